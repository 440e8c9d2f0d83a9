"""The clock of a pytest process that is a rank itself: a program that ends a test past its time limit, and reports in its place.

The main thread of such a process may wait in native code, where no Python signal handler runs. Its session log has the test that
runs, its limit and all reports. Before the limit the clock records what the ranks wait in. After the limit it writes the verdict,
the JUnit file and the failures so far, and ends the process. If the process has ended without a report, the clock reports.

Run as `python clock.py FOLDER`, with the folder of the rank. It imports the plugin once it has something to report.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_nsa.system.clock import monotonic, wall_clock

POLL_S = 0.1
WATCH_S, LOOK_S = 2.5, 0.9  # before a limit: begin to follow the boards; record what the ranks do
GRACE_S = 0.6  # after a limit, for pytest-timeout's own signal to end the test
VERDICT_S = 15.0  # for another rank's clock to write the verdict
OTHERS_S = 4.0  # for the other ranks' clocks to report, before a launcher ends them
ENDING_S = 1.5  # for the process to end itself
ENDED = "ended.json"
REPORTED = "reported"


@dataclass
class Session:
    """What the log of a rank's session has so far."""

    log: Path
    nodeid: str = ""  # of the test that runs
    began: float = 0.0
    limit: float = 0.0  # seconds since `began`; 0: none
    is_finished: bool = False
    run: str = ""  # the folder of the run's evidence, where there is one already
    reports: list[dict[str, Any]] = field(default_factory=list)
    _at: int = 0

    def read(self) -> None:
        """Read what has been added."""
        try:
            with self.log.open("rb") as file:
                file.seek(self._at)
                data = file.read()
        except OSError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        for line in whole.splitlines():
            self._take(json.loads(line))

    def _take(self, line: dict[str, Any]) -> None:
        match line["event"]:
            case "begin":
                self.nodeid, self.began, self.limit = line["nodeid"], line["time"], 0.0
            case "limit" if self.nodeid:
                self.began, self.limit = line["time"], line["seconds"]
            case "end":
                self.nodeid, self.limit = "", 0.0
            case "report":
                self.reports.append(line)
            case "run":
                self.run = line["path"]
            case "finish":
                self.is_finished = True

    def left(self) -> float:
        """Seconds until the limit of the test that runs; infinite without one."""
        return self.began + self.limit - wall_clock() if self.nodeid and self.limit else float("inf")


class Clock:
    """Follows the session of the process that started this one."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.launch = folder, folder.parent
        self.setup = json.loads((folder / "session.json").read_text(encoding="utf-8"))
        self.rank, self.host = self.setup["rank"], self.setup["host"]
        self.session = Session(folder / "session.jsonl")
        self._looked = ""  # the test for which the boards have been recorded
        self._job: Any = None

    def run(self) -> None:
        """Follow the session until it is over, or was ended; the last process of the launch deletes its folder."""
        lock = os.open(self.launch / ".in_use", os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_SH)
        self._follow_session()
        os.close(lock)
        if not self.session.is_finished:  # else the process itself deletes it
            from pytest_nsa.session.outer.launched import sweep

            sweep(self.launch)

    def _follow_session(self) -> None:
        while True:
            self.session.read()
            if self.session.is_finished:
                return
            if os.getppid() != self.host:
                self._report("its process has ended")
                return
            if (self.launch / ENDED).exists():
                self._report("ended with the others")
                self._end_host()
                return
            left = self.session.left()
            if left <= WATCH_S and self.session.nodeid != self._looked:
                self._follow(left)
            if left <= -GRACE_S:
                self._conclude()
                self._end_host()
                return
            select.select([sys.stdin], [], [], POLL_S)

    def _follow(self, left: float) -> None:
        """Read the boards, and shortly before the limit record what the ranks do; one clock per launch records."""
        from pytest_nsa.observe.observer import Observer

        self._job = self._job or Observer(self.launch)
        self._job.read_boards()
        if left > LOOK_S:
            return
        self._looked = self.session.nodeid
        try:
            (self.launch / "looking").mkdir()
        except FileExistsError:
            return  # another rank's clock records
        try:
            self._job.record_end("deadline", self.session.began)
            self._keep()
        finally:
            (self.launch / "looking").rmdir()

    def _keep(self) -> None:
        from pytest_nsa.session.outer import report as outer_report

        outer_report.keep_evidence(self.launch, self.setup, self.session.nodeid, self.session.limit)

    def _conclude(self) -> None:
        """Write the verdict, for all ranks of the launch, and report."""
        from pytest_nsa.session.outer import report as outer_report
        from pytest_nsa.wire.files import write_json

        try:
            (self.launch / "concluding").mkdir()
        except FileExistsError:
            deadline = monotonic() + VERDICT_S
            while not (self.launch / ENDED).exists() and monotonic() < deadline:
                time.sleep(POLL_S)
        else:
            write_json(self.launch / ENDED, outer_report.conclude_launch(self.launch, self.setup, self.session))
        self._report(f"ended at its time limit of {self.session.limit:g} s")
        deadline = monotonic() + OTHERS_S
        while monotonic() < deadline and not self._all_have_reported():
            time.sleep(POLL_S)

    def _all_have_reported(self) -> bool:
        return all((setup.parent / REPORTED).exists() for setup in self.launch.glob("rank*/session.json"))

    def _report(self, why: str) -> None:
        from pytest_nsa.session.outer import report as outer_report
        from pytest_nsa.wire.files import read_object, touch

        self.session.read()
        outer_report.report_session(self.setup, self.session, why, read_object(self.launch / ENDED))
        touch(self.folder / REPORTED)

    def _end_host(self) -> None:
        """Request that the process ends itself with exit code 1, else kill it. It is the parent, so its pid is not reused."""
        from pytest_nsa.rank.launched import END_REQUEST
        from pytest_nsa.wire.files import touch

        touch(self.folder / END_REQUEST)
        deadline = monotonic() + ENDING_S
        while os.getppid() == self.host and monotonic() < deadline:
            time.sleep(0.02)
        if os.getppid() == self.host:
            os.kill(self.host, signal.SIGKILL)


if __name__ == "__main__":
    Clock(Path(sys.argv[1])).run()
