"""Diagnose the ranks that tests start by themselves: at the time limit, at an interrupt, and when the session cannot end.

Children inherit a variable that names a folder; a child that joins a process group leaves evidence there (`nsa.trace.job_folders`).
A test that starts no process costs two entries of the environment.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Generator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from _pytest._code.code import ExceptionChainRepr, ReprTraceback

from pytest_nsa import marked
from pytest_nsa.diagnosis.decision import decide
from pytest_nsa.diagnosis.verdict import Verdict
from pytest_nsa.report import run as session_report
from pytest_nsa.report import runs
from pytest_nsa.report.plain import visible
from pytest_nsa.report.terminal import headline, short_path
from pytest_nsa.session import before_timeout
from pytest_nsa.session.failure_text import ReprEntryNative
from pytest_nsa.session.interrupts import at_interrupt
from pytest_nsa.session.items import Ranked
from pytest_nsa.session.runner import RankRunner
from pytest_nsa.session.started.child_stacks import ChildStacks, named
from pytest_nsa.session.started.job_announcer import JobAnnouncer
from pytest_nsa.session.started.process_ends import ProcessEnds, joined_at_exit, left_at_exit
from pytest_nsa.session.started.process_starts import on_start
from pytest_nsa.session.started.started_jobs import NO_JOB, Concluded, Occasion, conclude_jobs, describe, pids_of
from pytest_nsa.settings import Settings
from pytest_nsa.system.children import children
from pytest_nsa.system.descendants import Process, Started, ticks_since_boot

FOLDER, HOST = "NSA_TRACE_JOBS", "NSA_TRACE_HOST"  # as nsa.trace.job_folders reads them
LEFT_S = 0.3  # for a test's last processes to end
NAMED = 6  # processes that a report names

shown_key = pytest.StashKey[tuple[list[str], Verdict | None, Path | None]]()


class StartedRanks:
    """The hooks of `ranks_descendants`; ``runner`` has the run's folder."""

    def __init__(self, config: pytest.Config, settings: Settings, runner: RankRunner) -> None:
        self.config, self.settings, self.runner = config, settings, runner
        outer = os.environ.get(FOLDER)  # set by a pytest that runs this one in a test: it reads the jobs in its folder
        if outer:
            Path(outer).mkdir(mode=0o700, parents=True, exist_ok=True)
        self.base = Path(tempfile.mkdtemp(prefix="nsa-jobs-", dir=outer))
        self.environment = {FOLDER: str(self.base), HOST: str(os.getpid())}
        self.started = Started(f"{HOST}={os.getpid()}")
        self.announcer = JobAnnouncer(config, self.base)
        self.stacks = ChildStacks(self.base)
        self.pid = os.getpid()
        self.item: pytest.Item | None = None
        self.owner = ""
        self.began = (0.0, 0)  # the test: seconds since the epoch; ticks since boot
        self.before: list[int] = []  # the children that existed before the test
        self.has_children = self._is_concluding = False
        self.interrupted: list[str] = []
        self._ended = ""  # the owner of the processes that are to be ended, because the test is
        self._is_in_phase = False  # since the test was ended
        self.ends = ProcessEnds(self._to_end)
        self._undo_signal: Callable[[], None] | None = None
        self._undo_starts = on_start(self._before_child, self.environment)

    # -- children

    def _before_child(self) -> bool:
        """Note that the test starts a process; return False if no test runs."""
        if self.item is None or os.getpid() != self.pid:
            return False
        if not self.has_children:
            self.has_children = True
            self._follow()
            # Torch may have been imported before the variables were set: a forked child must inherit the hooks.
            if "torch" in sys.modules:
                importlib.import_module("nsa.trace.autostart").autostart()
            if threading.current_thread() is threading.main_thread():
                self._take_interrupt()
        return True

    def _follow(self) -> None:
        assert self.item is not None
        nodeid = self.item.nodeid
        of_fixtures = [pid for (pid, _), owner in self.started.owners.items() if owner != nodeid]
        self.announcer.follow(nodeid if self.owner == nodeid else "", of_fixtures)

    def _take_interrupt(self) -> None:
        before = signal.getsignal(signal.SIGINT)
        if not callable(before):
            return

        def interrupted(number: int, frame: FrameType | None) -> None:
            if self.item is not None and os.getpid() == self.pid and not self._is_concluding:
                _, self.interrupted = self._conclude("interrupted", 0.0, frame)
                self._end_soon()
            before(number, frame)

        self._undo_signal = at_interrupt(interrupted)

    # -- a test

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        if isinstance(item, Ranked) or marked.takes(item, "launch"):
            return (yield)
        self.item, self.owner, self.has_children = item, item.nodeid, False
        self._ended, self._is_in_phase = "", False
        self.began, self.before = (time.time(), ticks_since_boot()), children()
        os.environ.update(self.environment)
        try:
            return (yield)
        finally:
            for name in self.environment:
                os.environ.pop(name, None)
            if self._undo_signal is not None:
                self._undo_signal()
                self._undo_signal = None
            if self.has_children:
                self._after_test(item)
            self.item = None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Generator[None, Any, Any]:
        """Note the processes of a fixture with a wider scope: they serve other tests too, and are not ended with this one."""
        if fixturedef.scope == "function" or self.item is None:
            return (yield)
        if self.has_children:
            self._look()
        self.owner = f"{fixturedef.scope} fixture {fixturedef.argname}"
        try:
            return (yield)
        finally:
            if self.has_children:
                self._look()
            self.owner = self.item.nodeid
            if self.has_children:
                self._follow()

    def _look(self) -> list[Process]:
        return self.started.look(self.owner, self.began[1], self.before)

    def _after_test(self, item: pytest.Item) -> None:
        """Report the processes that the test left, or end them; delete the evidence of jobs that have ended."""
        self.announcer.follow("", ())
        if self._ended:
            self.ends.finish()
        found = self._look()
        if self._left(found, item.nodeid):
            time.sleep(LEFT_S)
            found = self._look()
        left = self._left(found, item.nodeid)
        if left:
            if self.settings.descendants == "end":
                self.ends.end(left)
                does = "ended"
            else:
                does = "still running (ranks_descendants = end ends them)"
            self._warn(item, f"processes that the test left, {does}: {'; '.join(map(named, left))}")
        alive = {p.pid for p in found if not p.has_ended}
        for job in self.base.glob("job-*"):
            if alive.isdisjoint(pids_of(job)):
                shutil.rmtree(job, ignore_errors=True)

    def _left(self, found: list[Process], nodeid: str) -> list[Process]:
        return [p for p in found if self.started.owners[p.key] == nodeid and not p.has_ended and not p.is_helper]

    def _warn(self, item: pytest.Item, text: str) -> None:
        """Show a warning that no filter turns into a failure."""
        line = (item.reportinfo()[1] or 0) + 1
        message = warnings.WarningMessage(
            pytest.PytestWarning(f"nsa: {text}"), pytest.PytestWarning, str(item.path), line
        )
        item.ihook.pytest_warning_recorded.call_historic(
            kwargs={"warning_message": message, "nodeid": item.nodeid, "when": "runtest", "location": None}
        )

    # -- its time limit

    @pytest.hookimpl(wrapper=True, optionalhook=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> Generator[None, Any, Any]:
        done = yield
        if item is self.item and before_timeout.by_signal(settings):
            before_timeout.call_around_alarm(
                lambda frame: self._at_limit(item, settings, frame), self._end_soon, self._is_blocked
            )
        elif item is self.item:
            before_timeout.call_before_timer(item, settings, lambda frame: self._at_end(item, settings, frame))
        return done

    def _at_end(self, item: pytest.Item, settings: Any, frame: FrameType | None) -> None:
        """Print and write the reports, because pytest-timeout's thread then ends the process."""
        text = self._at_limit(item, settings, frame)
        self.ends.finish()
        if text:
            self._write_reports(interrupted=True)
            sys.__stderr__.write("\n".join(["", f"{item.nodeid}:", *map(visible, text), ""]))  # type: ignore[union-attr]
            sys.__stderr__.flush()  # type: ignore[union-attr]

    def _at_limit(self, item: pytest.Item, settings: Any, frame: FrameType | None) -> list[str]:
        import pytest_timeout  # type: ignore[import-untyped]

        is_watched = not getattr(settings, "disable_debugger_detection", False) and pytest_timeout.is_debugging()
        if is_watched or self._is_concluding or not (self.has_children or self.started.owners):
            return []
        jobs, text = self._conclude("deadline", settings.timeout, frame)
        if text:
            self._keep_for_report(item, jobs, text)
        return text

    def _end_soon(self) -> bool:
        """End the processes of the ended test, which has a little time to do so; return whether it has any."""
        self._is_in_phase = True
        return self.ends.begin()

    def _to_end(self) -> list[Process]:
        return [p for p in self._look() if self.started.owners[p.key] == self._ended and not p.is_helper]

    def _is_blocked(self, frame: FrameType | None) -> bool:
        """Return whether the test or its fixture is still in the phase in which it was ended."""
        return self._is_in_phase and bool(_place(frame, self.config.rootpath))

    @staticmethod
    def _keep_for_report(item: pytest.Item, jobs: list[Concluded], text: list[str]) -> None:
        explains = jobs[0] if jobs and not jobs[0].is_idle else None
        item.stash[shown_key] = (
            text, explains.verdict if explains else None, explains.evidence.folder if explains else None
        )  # fmt: skip

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        self._is_in_phase = False
        report: Any = yield
        is_over = call.excinfo is not None and not isinstance(call.excinfo.value, pytest.skip.Exception)
        if item is not self.item or not is_over:
            return report
        if shown_key not in item.stash and self.has_children:
            jobs, text = self._conclude("", 0.0, None)
            if jobs and jobs[0].verdict.failed and not jobs[0].owner:
                self._keep_for_report(item, jobs, text)
        text, verdict, folder = item.stash.get(shown_key, ([], None, None))
        if text:
            del item.stash[shown_key]
            if report.failed:
                _put_verdict_first(report, text)
            if verdict is not None:
                report.nsa_explained = verdict.failed
                named = ("nsa.verdict", headline(verdict))
                report.user_properties.append(named)
                item.user_properties.append(named)  # of its later reports
                if hasattr(report, "wasxfail") and folder is not None:
                    self.runner.recorder.expect_failure(folder, verdict)
        return report

    # -- verdicts

    def _conclude(self, reason: str, timeout: float, frame: FrameType | None) -> tuple[list[Concluded], list[str]]:
        """Diagnose the jobs; if the test is being ended (``reason``), its processes are to be ended."""
        self._is_concluding = True
        try:
            found = self._look()
            nodeid = self.owner
            occasion = Occasion(reason, nodeid, str(self.config.rootpath), timeout, self.began[0])
            jobs = conclude_jobs(self.base, self.runner.folder, found, self._fixture_of, occasion)
            of_jobs = {pid for job in jobs for pid in job.pids}
            # One that has ended: a failure that the test has not waited for.
            shown = [p for p in found if not p.has_ended or (p.status and p.key not in self.ends.ended)]
            others = [p for p in shown if p.pid not in of_jobs and not p.is_helper]
            others.sort(key=lambda p: (self.started.owners[p.key] != nodeid, p.pid))
            lines = [self._line(p, is_ending=bool(reason)) for p in others[:NAMED]]
            text = describe(jobs, lines, _place(frame, self.config.rootpath)) if jobs or others else []
            if reason:
                self._ended = nodeid
            return jobs, text
        finally:
            self._is_concluding = False

    def _line(self, process: Process, *, is_ending: bool) -> str:
        """Return a process in one line; with its places in the code, if it is about to be ended."""
        owner = self._fixture_of(process.pid)
        places = self.stacks.places(process.pid) if is_ending and not owner else ()
        return named(process, places, owner)

    def _fixture_of(self, pid: int) -> str:
        owner = next((of for (known, _), of in self.started.owners.items() if known == pid), self.owner)
        return "" if owner == self.owner else owner

    # -- the session's end

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, Any, Any]:
        if self._is_worker:
            self._at_exit()
        try:
            return (yield)
        finally:
            fails = self.settings.left_fails and not self._is_worker and self._at_exit()
            if fails and session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @property
    def _is_worker(self) -> bool:
        """Whether it is a worker of xdist: its controller waits for no process of it."""
        return hasattr(self.config, "workerinput")

    def _at_exit(self) -> bool:
        """End the processes that multiprocessing would wait for at exit, once they are idle; return whether there were any."""
        if os.getpid() != self.pid or not joined_at_exit():
            return False
        limit = float(getattr(self.config, "_env_timeout", 0) or 0) or float("inf")
        left = left_at_exit(self.started, self._look, limit)
        if not left:
            return False
        owners = {self.started.owners.get(p.key, "") for p in left}
        self.owner = sorted(owners)[0]
        self.began = (0.0, ticks_since_boot())
        jobs, text = self._conclude("deadline", 0.0, None)
        self.ends.end([p for p in left if not p.is_helper])
        first = f"nsa: {len(left)} processes would keep this session from ending, left by {', '.join(sorted(owners))}; ended"
        if jobs and not self._is_worker:
            self._write_reports(interrupted=False)
            text.append(f"  SUMMARY  {short_path(self.runner.folder.path / 'SUMMARY.md')}")
        sys.__stderr__.write("\n".join(["", first, *map(visible, text), ""]))  # type: ignore[union-attr]
        sys.__stderr__.flush()  # type: ignore[union-attr]
        return True

    def _write_reports(self, *, interrupted: bool) -> None:
        run = self.runner.folder
        with contextlib.suppress(OSError):
            entries, _ = session_report.write_reports(run.path, self.settings.gpus, decide, interrupted=interrupted)
            runs.finish(run.path, sum(e.verdict.failed for e in entries), interrupted=interrupted)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the diagnosis of the test that was interrupted."""
        if self.interrupted:
            terminalreporter.write_sep("=", "interrupted; until then")
            for line in self.interrupted:
                terminalreporter.write_line(visible(line))

    def pytest_unconfigure(self) -> None:
        """Leave subprocess and multiprocessing as they were."""
        self._undo_starts()
        self.announcer.close()
        if os.getpid() == self.pid:
            if joined_at_exit():
                # The program's own handlers of atexit come before this one, and may end these processes.
                sys.modules["multiprocessing.util"].Finalize(None, self._finish, exitpriority=0)
            else:
                self._finish()

    def _finish(self) -> None:
        try:
            self._at_exit()
        finally:
            self.stacks.close()
            shutil.rmtree(self.base, ignore_errors=True)


def _put_verdict_first(report: Any, text: list[str]) -> None:
    """Put the verdict before the failure's text, and into the short summary, in a form that xdist's workers can send."""
    shown = "\n".join(map(visible, text)) + "\n"
    if isinstance(report.longrepr, ExceptionChainRepr):
        entry = ReprTraceback([ReprEntryNative([shown])], None, style="native")
        report.longrepr.chain = [(entry, None, "The test itself:"), *report.longrepr.chain]
        if text[0] != NO_JOB and report.longrepr.reprcrash is not None:
            report.longrepr.reprcrash.message = visible(text[0])
    else:
        report.longrepr = f"{shown}{report.longrepr}"


def _place(frame: FrameType | None, root: Path) -> str:
    """Return the innermost line of the repository on a stack."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(root) and "site-packages" not in path.parts:
            return f"{short_path(path)}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
