"""In the program that announces (`announce`): an observer for each job of a session."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path

from pytest_nsa.diagnosis.verdict import Finding, describe_ranks
from pytest_nsa.observe.announcements import WAITED_FOR_S, announcement
from pytest_nsa.observe.finders import jobs_in
from pytest_nsa.observe.observer import Observer
from pytest_nsa.report.plain import visible
from pytest_nsa.report.runs import ANNOUNCEMENTS
from pytest_nsa.session.masking import mask_all
from pytest_nsa.wire.files import append_line, read_object

LOOK_S = 0.25


def follow_jobs(folder: str, test: str, is_over: Callable[[], bool]) -> None:
    """Announce suspicions in the jobs below ``folder`` until the session is over. ``test``: the file on the test that runs."""
    if read_object(Path(test)).get("masks"):
        mask_all()  # as the session does
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
