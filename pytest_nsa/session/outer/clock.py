"""The clock of a launch: a process that ends tests past their time limit, and reports for pytest processes that cannot.

The main thread of a pytest process that is a rank itself may wait in native code, where no Python signal handler runs. Each process
forks a clock before its first test. One clock of a machine acts for all, and another takes its place when its own session is over.
Before a limit it records what the ranks wait in. After the limit it writes the verdict, by the rules that the repository has
added, the JUnit file and the failures so far, and ends the processes.
"""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import pytest
from _pytest.junitxml import LogXML, xml_key

from pytest_nsa.diagnosis.decision import decide
from pytest_nsa.observe.conclude import conclude
from pytest_nsa.observe.observer import Observer
from pytest_nsa.rank.outer_rank import END_REQUEST
from pytest_nsa.report import run as session_report
from pytest_nsa.report import runs
from pytest_nsa.report.plain import visible
from pytest_nsa.report.terminal import lines, short_path
from pytest_nsa.session.folders import Recorder, RunFolder, safe_name
from pytest_nsa.session.masking import mask_files
from pytest_nsa.session.outer.session_log import LoggedSession, SessionLog, merge_junit, sweep
from pytest_nsa.session.runner import RankRunner
from pytest_nsa.system.clock import monotonic, wall_clock
from pytest_nsa.system.descendants import reap
from pytest_nsa.system.prctl import fork
from pytest_nsa.wire.files import read_lines, touch, write_atomically, write_json
from pytest_nsa.wire.messages import Job

POLL_S = 0.1
WATCH_S, LOOK_S = 2.5, 0.9  # before a limit: begin to follow the boards; record what the ranks do
GRACE_S = 0.6  # after a limit, for pytest-timeout's own signal to end the test
ENDING_S = 1.5  # for processes to end themselves
CLOSE_S = 20.0  # for a clock that writes a verdict
REPORTED = "reported"  # a session that has ended without its report
KEPT = "evidence"  # a copy of the launch's evidence, in the form of a test's folder
_FILES = ("board.bin", "stall.json", "counters.json")
_TEST_EVENTS = ("exception", "skipped", "xfailed")


class Clock:
    """``junit_path``: the file that all processes of the launch share. ``screen``: the terminal's descriptor."""

    def __init__(
        self, log: SessionLog, runner: RankRunner, world_size: int, junit_path: Path | None, screen: int
    ) -> None:
        self.log, self.runner, self.config, self.settings = log, runner, runner.config, runner.settings
        self.world_size, self.junit_path, self.screen = world_size, junit_path, screen
        self.launch = log.run or Path()
        self.sessions: dict[Path, LoggedSession] = {}
        self._looked = ""  # the test for which the boards have been recorded
        self._observer = Observer(self.launch)
        self._pid = 0

    def start(self) -> None:
        """Fork the clock. It has the repository's rules, and no connection or thread of the session."""
        self._pid = fork()
        if self._pid:
            return
        try:
            os.setsid()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
                signal.signal(number, signal.SIG_DFL)
            self._wait_for_turn()
        except BaseException:
            os.write(self.screen, traceback.format_exc().encode())
        finally:
            os._exit(0)

    def close(self) -> None:
        """Wait for the end of the clock: the session has reported everything itself.

        On a full disk its log does not show that.
        """
        if self._pid:
            reap(self._pid, CLOSE_S)

    def _wait_for_turn(self) -> None:
        """Act for all sessions of the launch once no other clock does, until this session is over."""
        own = LoggedSession(self.log.folder)
        fd = os.open(self.launch, os.O_RDONLY)
        while True:
            own.read()
            if own.is_finished:
                return
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                time.sleep(POLL_S)
                continue
            self._follow_sessions(own)
            return

    def _follow_sessions(self, own: LoggedSession) -> None:
        while True:
            for folder in self.launch.glob("rank*"):
                self.sessions.setdefault(folder, own if folder == own.folder else LoggedSession(folder)).read()
            open_ones = [s for s in self.sessions.values() if s.pid and not s.is_finished]
            live = [s for s in open_ones if s.is_alive]
            for session in open_ones:
                if session not in live and not (session.folder / REPORTED).exists():
                    self._report(session, "its process has ended")
            if own.is_finished or not live:
                break
            late = min(live, key=LoggedSession.left)
            if late.left() <= WATCH_S and late.nodeid != self._looked:
                self._look(late, late.left())
            if late.left() <= -GRACE_S:
                self._end(late, live)
                break
            time.sleep(POLL_S)
        if not own.is_finished:  # else the process itself deletes the folder
            os.close(self.log._lock)
            sweep(self.launch)

    def _look(self, session: LoggedSession, left: float) -> None:
        """Read the boards, and shortly before the limit record what the ranks do."""
        self._observer.read_boards()
        if left > LOOK_S:
            return
        self._looked = session.nodeid
        self._observer.record_end("deadline", session.began)
        self._keep_evidence(session)

    def _keep_evidence(self, late: LoggedSession) -> None:
        """Copy the ranks' evidence so far into a folder for the test in which a rank is past its time limit.

        Exceptions of tests that no rank runs any more are not copied. A rank that failed in this test may be in the next test
        already, so the tests of all ranks count.
        """
        tests = {session.nodeid for session in self.sessions.values()}
        kept = self.launch / KEPT
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir()
        job = Job(
            nodeid=late.nodeid, folder=str(kept), root=str(self.config.rootpath), world_size=self.world_size, backend="",
            timeout=late.limit, created=late.began,
        )  # fmt: skip
        write_json(kept / "job.json", job.to_json(), indent=1)
        for path in (*self.launch.glob("heartbeat_rank*.jsonl"), self._observer.log):
            if path.is_file():
                shutil.copy(path, kept)
        for session in self.sessions.values():
            own = kept / session.folder.name
            own.mkdir()
            for name in _FILES:
                with contextlib.suppress(FileNotFoundError):
                    shutil.copy(session.folder / name, own)
            events = read_lines(session.folder / "events.jsonl")
            of_tests = (e for e in events if e.get("event") not in _TEST_EVENTS or e.get("nodeid") in tests)
            of_reports = (e for e in session.reports if e["report"].get("nodeid") in tests)
            for name, entries in (("events.jsonl", of_tests), ("reports.jsonl", of_reports)):
                write_atomically(own / name, "".join(json.dumps(entry) + "\n" for entry in entries))

    def _end(self, late: LoggedSession, live: Sequence[LoggedSession]) -> None:
        """Write the verdict on a test past its limit, report for all sessions, and end their processes."""
        if not (self.launch / KEPT).is_dir() or self._looked != late.nodeid:
            self._observer.record_end("deadline", late.began)
            self._keep_evidence(late)
        verdict = self._conclude(late)
        for session in live:
            session.read()
            ended = f"ended at its time limit of {session.limit:g} s" if session.left() < 0 else "ended with the others"
            self._report(session, ended, verdict, is_first=session is late)
        for session in live:
            touch(session.folder / END_REQUEST)
        deadline = monotonic() + ENDING_S
        while any(session.is_alive for session in live) and monotonic() < deadline:
            time.sleep(0.02)
        for session in live:
            with contextlib.suppress(OSError):
                handle = os.pidfd_open(session.pid)
                if session.is_alive:
                    signal.pidfd_send_signal(handle, signal.SIGKILL)

    def _conclude(self, late: LoggedSession) -> list[str]:
        """Write the verdict, SUMMARY.md and report.html into the run's folder. Return the lines to print."""
        made = next((Path(session.run) for session in self.sessions.values() if session.run), None)
        settings = self.settings
        run = RunFolder(made.parent if made else settings.artifacts, made.name if made else None)
        folder = run.test_folder(safe_name(late.nodeid))
        shutil.copytree(self.launch / KEPT, folder, dirs_exist_ok=True)
        if settings.mask_output:
            mask_files(folder)
        verdict, evidence = conclude(folder, self.runner.extensions.rules)
        Recorder(run).add(folder, verdict)
        session_report.write_reports(run.path, settings.gpus, decide, interrupted=True)
        runs.finish(run.path, 1, interrupted=True)
        return [*lines(verdict, evidence), f"SUMMARY.md: {short_path(run.path / 'SUMMARY.md')}"]

    def _report(self, session: LoggedSession, why: str, verdict: Sequence[str] = (), *, is_first: bool = False) -> None:
        """Print and write the failures of a session that cannot report by itself, and the test that ran.

        ``verdict``: the lines on the test that is past its limit; the session that ``is_first`` prints them.
        """
        reports = [pytest.TestReport._from_json(dict(line["report"])) for line in session.reports]
        if session.nodeid:
            reports.append(_ended_report(session, "\n".join([why, *verdict])))
        if self.junit_path is not None:
            self._write_junit(self.junit_path, session, reports)
        out = [""]
        for line in session.reports:
            if line["report"]["outcome"] == "failed":
                out += [f"FAILED {line['report']['nodeid']}", *line["text"].splitlines(), ""]
        if session.nodeid:
            out.append(f"{'HANG' if verdict else 'CRASH'} {session.nodeid}: {why}")
        out += verdict if is_first else ()
        passed = {r.nodeid for r in reports if r.when == "call" and r.passed}
        failed = {r.nodeid for r in reports if r.failed}
        out.append(f"{len(failed)} failed, {len(passed - failed)} passed; the session was ended")
        text = "\n".join(f"[rank {session.rank}] {visible(line)}" if line else "" for line in out)
        with open(self.screen, "wb", closefd=False) as screen:
            screen.write(f"{text}\n".encode())
        touch(session.folder / REPORTED)

    def _write_junit(self, target: Path, session: LoggedSession, reports: Sequence[pytest.TestReport]) -> None:
        """Write the testsuite of a session, by pytest's own writer, into the file that all processes of the launch share."""
        given = self.config.stash[xml_key]
        own = target.with_name(f".{target.name}.rank{session.rank}.partial")
        xml = LogXML(
            str(own), given.prefix, given.suite_name, given.logging, given.report_duration, given.family, given.log_passing_tests
        )  # fmt: skip
        xml.pytest_sessionstart()
        for report in reports:
            if report.nodeid not in session.not_ours:
                xml.pytest_runtest_logreport(report)
        xml.pytest_sessionfinish()
        merge_junit(target, own, self.log.launch, session.rank)


def _ended_report(session: LoggedSession, text: str) -> pytest.TestReport:
    location = next((r["report"]["location"] for r in session.reports if r["report"]["nodeid"] == session.nodeid), None)
    path, _, name = session.nodeid.partition("::")
    return pytest.TestReport(
        nodeid=session.nodeid, location=tuple(location or (path, 0, name)), keywords={}, outcome="failed", longrepr=text,
        when="call", duration=wall_clock() - session.began, start=session.began, stop=wall_clock(),
    )  # fmt: skip
