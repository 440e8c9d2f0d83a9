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

import json
import os
import sys
import time

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
        from pytest_nsa.session.started.follow_jobs import follow_jobs

        follow_jobs(folder, test, is_over)


def _stat(pid: int) -> list[str]:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


if __name__ == "__main__":
    if os.fork():
        os._exit(0)
    os.setsid()
    sys.path[:] = json.loads(sys.argv[4])
    announce(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
