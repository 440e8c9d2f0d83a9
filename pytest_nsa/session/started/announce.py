"""Announce suspicions in the jobs that a test has started by itself, while the test runs.

``python announce.py TEST PID BEGAN SYS_PATH``: TEST is a file in the folder of a session's jobs; PID and BEGAN are the session's
process and its start, in clock ticks; SYS_PATH is a JSON list. The file names the test that runs (``nodeid``), the jobs that
it has not started (``others``), and whether the session masks secrets (``masks``). What is announced is printed, and appended to
``announcements.jsonl`` in that folder, for the session's report.

A session starts this program when a test first starts a process, by its path and without ``site``: for tests that start processes
but no ranks, it costs an empty interpreter. The modules that read evidence are imported when a rank leaves some. The program is a
child of init, so that a test which waits for its children, or counts them, does not find it. It ends when the folder is deleted or
the process has ended.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import time
from collections.abc import Callable

LOOK_S = 0.25
_STATE, _BEGAN = 0, 19  # fields of /proc/PID/stat after the command's name


def announce(test: str, pid: int, began: int) -> None:
    """Follow the jobs of a session until it is over."""
    folder = os.path.dirname(test)

    def is_over() -> bool:
        fields = _stat(pid)
        return not os.path.isdir(folder) or not fields or fields[_STATE] in "ZX" or int(fields[_BEGAN]) != began

    # os.walk skips folders that are deleted while it runs.
    while not is_over() and not any(n.startswith("job-") for _, names, _ in os.walk(folder) for n in names):
        time.sleep(LOOK_S)
    if not is_over():
        _follow(folder, test, is_over)


def _stat(pid: int) -> list[str]:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def _follow(folder: str, test: str, is_over: Callable[[], bool]) -> None:
    from pathlib import Path

    from pytest_nsa.diagnosis.verdict import Finding, describe_ranks
    from pytest_nsa.observe.announcements import WAITED_FOR_S, announcement
    from pytest_nsa.observe.finders import jobs_in
    from pytest_nsa.observe.observer import Observer
    from pytest_nsa.report.plain import visible
    from pytest_nsa.report.runs import ANNOUNCEMENTS
    from pytest_nsa.wire import masking
    from pytest_nsa.wire.files import append_line, read_object

    if read_object(Path(test)).get("masks"):
        from nsa.trace import secrets

        masking.mask_with(secrets)  # as the session does
    observers: dict[Path, Observer] = {}
    announced: set[Path] = set()

    def announce_of(job: Path, found: Finding, seconds: float, at_work: bool) -> None:
        now, boards = read_object(Path(test)), observers[job].boards.values()
        if job in announced or not now.get("nodeid") or str(job) in now["others"]:
            return
        announced.add(job)
        who = describe_ranks(found.ranks, int(max(b.numbers["world_size"] for b in boards)))
        what = "a suspicion; the test's own time limit ends it"
        text = visible(announcement(found, now["nodeid"], who, seconds, what, at_work=at_work))
        sys.stderr.write(f"\n{text}\n")
        with contextlib.suppress(OSError):
            append_line(Path(folder, ANNOUNCEMENTS), {"time": time.time(), "text": text})

    while not is_over():
        jobs = [job for job in jobs_in(Path(folder)) if (job / "job.json").exists()]
        observers = {job: observer for job, observer in observers.items() if job in jobs}
        for job in jobs:
            try:
                if job not in observers:
                    observers[job] = Observer(
                        job, announce=functools.partial(announce_of, job), announce_after=WAITED_FOR_S
                    )
                observers[job].look()
            except (OSError, ValueError):
                continue  # the test has ended, and the session deletes the job
        time.sleep(LOOK_S)


if __name__ == "__main__":
    if os.fork():
        os._exit(0)
    os.setsid()
    sys.path[:] = json.loads(sys.argv[4])
    announce(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
