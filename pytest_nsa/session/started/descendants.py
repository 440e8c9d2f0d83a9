"""Diagnose the ranks that tests start by themselves: at the time limit, at an interrupt, and when the session cannot end.

Children get a variable that names a folder; a child that joins a process group leaves evidence there (`nsa.trace.job_folders`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import pytest

from pytest_nsa import marked
from pytest_nsa.diagnosis.decision import decide
from pytest_nsa.observe.finders import jobs_in
from pytest_nsa.report import run as session_report
from pytest_nsa.report import runs
from pytest_nsa.report.plain import visible
from pytest_nsa.report.terminal import short_path
from pytest_nsa.session import before_timeout
from pytest_nsa.session.interrupts import at_interrupt
from pytest_nsa.session.items import Ranked
from pytest_nsa.session.runner import RankRunner
from pytest_nsa.session.started import reports
from pytest_nsa.session.started.child_stacks import ChildStacks, named
from pytest_nsa.session.started.job_announcer import JobAnnouncer
from pytest_nsa.session.started.process_ends import (
    IDLE_S,
    WORKER_WAITS,
    ProcessEnds,
    is_interrupted,
    joined_at_exit,
    left_at_exit,
    of_jobs,
)
from pytest_nsa.session.started.process_starts import on_start
from pytest_nsa.session.started.processes_of_test import ProcessesOfTest
from pytest_nsa.session.started.started_jobs import (
    Concluded,
    Occasion,
    conclude_jobs,
    describe,
    pids_of,
    unnoticed,
)
from pytest_nsa.settings import Settings
from pytest_nsa.system.descendants import Process, wait_for_ends

FOLDER, HOST = "NSA_TRACE_JOBS", "NSA_TRACE_HOST"  # as nsa.trace.job_folders reads them
LEFT_S = 0.3  # for a test's last processes to end
NAMED = 6  # processes that a report names


Part = TypeVar("Part", bound=Callable[..., Any])


def _harmless(part: Part) -> Part:
    """Let a failure of this code be none of the test, which may have replaced functions of os or time, or the whole file system.

    The failure is reported as a warning; ``part`` then returns None.
    """

    @functools.wraps(part)
    def wrapped(self: StartedRanks, *args: Any) -> Any:
        try:
            return part(self, *args)
        except Exception as error:
            self._failures.setdefault(f"{type(error).__name__}: {error}", False)
            return None

    return wrapped  # type: ignore[return-value]


def _print(lines: list[str]) -> None:
    """Print lines past pytest's capture, for which it is too late."""
    print("", *lines, sep="\n", file=sys.__stderr__, flush=True)


class StartedRanks:
    """The hooks of `ranks_descendants`; ``runner`` has the run's folder."""

    def __init__(self, config: pytest.Config, settings: Settings, runner: RankRunner) -> None:
        self.config, self.settings, self.runner = config, settings, runner
        outer = os.environ.get(FOLDER)  # set by a pytest that runs this one in a test: it reads the jobs in its folder
        if outer:
            Path(outer).mkdir(mode=0o700, parents=True, exist_ok=True)
        self.base = Path(tempfile.mkdtemp(prefix="nsa-jobs-", dir=outer))
        self.environment = {FOLDER: str(self.base), HOST: str(os.getpid())}
        self.processes = ProcessesOfTest(f"{HOST}={os.getpid()}")
        self.announcer = JobAnnouncer(config, self.base)
        self.stacks = ChildStacks(self.base)
        self.pid = os.getpid()
        self.interrupted: list[str] = []
        self._is_concluding = self._hooks_forks = False
        self._ended = ""  # the owner of the processes that are to be ended, because the test is
        self._is_over = is_interrupted  # whether the test has not caught what ended it
        self._is_in_phase = False  # since the test was ended
        self._failures: dict[str, bool] = {}  # of this code, and whether they have been reported
        self.ends = ProcessEnds(self._to_end)
        self._undo_signal: Callable[[], None] | None = None
        self._undo_starts = on_start(self._may_start, self._has_started, self.environment)

    # -- children

    def _may_start(self) -> bool:
        """Note that the test starts a process; return False if no test runs."""
        if not self.processes.is_here:
            return False
        if not self.processes.has_any:
            self.processes.has_any = True
            self._follow()
        if not self._hooks_forks and "torch.distributed" in sys.modules:
            self._hook_forks()
        return True

    @_harmless
    def _hook_forks(self) -> None:
        """Wrap torch's functions, which a forked child inherits: torch was imported without the variables."""
        importlib.import_module("nsa.trace.autostart").hook_forks()
        self._hooks_forks = True

    @_harmless
    def _has_started(self, pid: int) -> None:
        self.processes.add(pid)

    @_harmless
    def _follow(self) -> None:
        item, owner = self.processes.item, self.processes.owner
        self.announcer.follow(owner if item is not None and owner == item.nodeid else "", self.processes.of_fixtures())

    def _take_interrupt(self) -> None:
        """Take Ctrl-C before the first fixture, until the session ends: a suite may compare handlers around each test."""
        before = signal.getsignal(signal.SIGINT)
        is_taken = self._undo_signal is not None or threading.current_thread() is not threading.main_thread()
        if is_taken or before is not signal.default_int_handler:  # the program's own
            return

        def interrupted(number: int, frame: FrameType | None) -> None:
            if self.processes.is_here and self.processes.has_any and not self._is_concluding:
                self._at_interrupt(frame)
            before(number, frame)

        self._undo_signal = at_interrupt(interrupted)

    @_harmless
    def _at_interrupt(self, frame: FrameType | None) -> None:
        _, self.interrupted = self._conclude("interrupted", 0.0, frame)
        self._is_over = is_interrupted
        self._end_soon()

    # -- a test

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        if isinstance(item, Ranked) or marked.takes(item, "launch"):
            return (yield)
        self._ended, self._is_in_phase = "", False
        self._take_interrupt()
        self._begin(item)
        try:
            return (yield)
        finally:
            if not is_interrupted():
                self.interrupted = []  # the test has caught it
            if self.processes.has_any:
                self._after_test(item)
            self.processes.item = None
            self._report_failures(item)

    @_harmless
    def _begin(self, item: pytest.Item) -> None:
        self.processes.begin(item)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Generator[None, Any, Any]:
        """Note the processes of a fixture with a wider scope: they serve other tests too, and are not ended with this one."""
        if fixturedef.scope == "function" or self.processes.item is None:
            return (yield)
        before = self._begin_fixture(f"{fixturedef.scope} fixture {fixturedef.argname}")
        try:
            return (yield)
        finally:
            self._end_fixture(before or [])

    @_harmless
    def _begin_fixture(self, name: str) -> list[int]:
        return self.processes.begin_fixture(name)

    @_harmless
    def _end_fixture(self, before: list[int]) -> None:
        self.processes.end_fixture(before)
        if self.processes.has_any:
            self._follow()

    @_harmless
    def _after_test(self, item: pytest.Item) -> None:
        """Report the processes that the test left, or end them; delete the evidence of jobs that have ended."""
        self.announcer.follow("", ())
        self.announcer.hand_to(self.runner.folder)
        if self._ended and self._is_over():
            self.ends.finish()
        wait_for_ends(self.processes.of(item.nodeid), LEFT_S)
        left = [p for p in self.processes.of(item.nodeid) if not p.has_ended]
        if left:
            shown = "; ".join(map(named, left))
            if self.settings.descendants == "end":
                self.ends.end(left)
                does = "ended"
            else:
                does = "still running (ranks_descendants = end ends them)"
            reports.warn(item, f"processes that the test left, {does}: {shown}")
        alive = {p.pid for p in self.processes.look() if not p.has_ended}
        for job in jobs_in(self.base):
            if alive.isdisjoint(pids_of(job)):
                shutil.rmtree(job, ignore_errors=True)

    def _report_failures(self, item: pytest.Item) -> None:
        for failure, is_reported in self._failures.items():
            if not is_reported:
                self._failures[failure] = True
                reports.warn(item, f"the processes of this test were not followed to its end: {failure}")

    # -- its time limit

    @pytest.hookimpl(wrapper=True, optionalhook=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> Generator[None, Any, Any]:
        done = yield
        if item is self.processes.item and before_timeout.by_signal(settings):
            before_timeout.call_around_alarm(
                lambda frame: self._at_limit(item, settings, frame), self._end_soon, self._is_blocked
            )
        elif item is self.processes.item:
            before_timeout.call_before_timer(item, settings, lambda frame: self._at_end(item, settings, frame))
        return done

    @_harmless
    def _at_end(self, item: pytest.Item, settings: Any, frame: FrameType | None) -> None:
        """Print and write the reports, because pytest-timeout's thread then ends the process."""
        text = self._at_limit(item, settings, frame)
        self.ends.finish()
        if text:
            self._write_reports(interrupted=True)
            _print([f"{item.nodeid}:", *map(visible, text)])

    @_harmless
    def _at_limit(self, item: pytest.Item, settings: Any, frame: FrameType | None) -> list[str]:
        import pytest_timeout  # type: ignore[import-untyped]

        is_watched = not getattr(settings, "disable_debugger_detection", False) and pytest_timeout.is_debugging()
        if is_watched or self._is_concluding or not self.processes.look():
            return []
        self.processes.has_any = True  # also those that it has forked by itself
        jobs, text = self._conclude("deadline", settings.timeout, frame)
        self._is_over = lambda: True
        if text:
            reports.keep(item, jobs, text)
        return text

    @_harmless
    def _end_soon(self) -> bool:
        """End the processes of the ended test, which has a little time to do so; return whether it has processes."""
        self._is_in_phase = True
        return self.ends.begin(self._is_over) or bool(self.processes.of(self._ended))

    def _to_end(self) -> list[Process]:
        """Return the processes to end: with `report` those of its jobs, as a later test may use the others (a pool's workers)."""
        found = self.processes.of(self._ended)
        if self.settings.descendants == "end":
            return found
        return of_jobs(found, {pid for job in jobs_in(self.base) for pid in pids_of(job)})

    def _is_blocked(self, frame: FrameType | None) -> bool:
        """Return whether the test or its fixture is still in the phase in which it was ended."""
        return self._is_in_phase and bool(reports.place(frame, self.config.rootpath))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        self._is_in_phase = False
        report: Any = yield
        if item is not self.processes.item:
            return report
        if call.when == "call" and report.passed and self.processes.has_any:
            self._at_pass(item, report)
        if call.excinfo is None or isinstance(call.excinfo.value, pytest.skip.Exception):
            return report
        if not reports.has(item) and self.processes.has_any:
            self._at_failure(item)
        reports.add(item, report, self.runner.recorder)
        return report

    @_harmless
    def _at_failure(self, item: pytest.Item) -> None:
        jobs, text = self._conclude("", 0.0, None)
        if jobs and jobs[0].verdict.failed and not jobs[0].owner:
            reports.keep(item, jobs, text)

    @_harmless
    def _at_pass(self, item: pytest.Item, report: Any) -> None:
        """Report what a rank raised and the test has not noticed."""
        raised = unnoticed(self.base, self.processes.began)
        if not raised:
            return
        if self.settings.descendants_fail:
            report.outcome, report.longrepr = "failed", f"{raised}, and the test passed (ranks_descendants_fail)"
        else:
            reports.warn(item, f"{raised}, and the test passed (ini ranks_descendants_fail makes this a failure)")

    # -- verdicts

    def _conclude(self, reason: str, timeout: float, frame: FrameType | None) -> tuple[list[Concluded], list[str]]:
        """Diagnose the jobs; if the test is being ended (``reason``), its processes are to be ended."""
        self._is_concluding = True
        try:
            found, owner = self.processes.look(), self.processes.owner
            occasion = Occasion(reason, owner, str(self.config.rootpath), timeout, self.processes.began)
            jobs = conclude_jobs(
                self.base, self.runner.folder, found, self.processes.fixture_of, occasion, self.runner.extensions.rules
            )
            self.announcer.hand_to(self.runner.folder)
            of_jobs = {pid for job in jobs for pid in job.pids}
            # One that has ended: a failure that the test has not waited for.
            shown = [p for p in found if not p.has_ended or (p.status and p.key not in self.ends.ended)]
            others = [p for p in shown if p.pid not in of_jobs and not p.is_helper]
            others.sort(key=lambda p: (self.processes.owners[p.key] != owner, p.pid))
            lines = [self._line(p, is_ending=bool(reason)) for p in others[:NAMED]]
            text = describe(jobs, lines, reports.place(frame, self.config.rootpath)) if jobs or others else []
            self._ended = owner if reason else self._ended
            return jobs, text
        finally:
            self._is_concluding = False

    def _line(self, process: Process, *, is_ending: bool) -> str:
        """Return a process in one line; with its places in the code, if it is about to be ended."""
        owner = self.processes.fixture_of(process.pid)
        places = self.stacks.places(process.pid) if is_ending and not owner else ()
        return named(process, places, owner)

    # -- the session's end

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, Any, Any]:
        try:
            return (yield)
        finally:
            fails = self.settings.left_fails and not self._is_worker and self._at_exit()
            if fails and session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @property
    def _is_worker(self) -> bool:
        """Whether it is a worker of xdist: its controller kills it if it does not end soon."""
        return hasattr(self.config, "workerinput")

    @_harmless
    def _at_exit(self) -> bool:
        """End the processes that multiprocessing would wait for at exit, once they are idle; return whether there were any."""
        if os.getpid() != self.pid or not joined_at_exit():
            return False
        limit = float(getattr(self.config, "_env_timeout", 0) or 0) or float("inf")
        waits = WORKER_WAITS if self._is_worker else (IDLE_S, max(limit, IDLE_S))
        left = left_at_exit(self.processes, *waits)
        if not left:
            return False
        owners = {self.processes.owners.get(p.key, "") for p in left}
        self.processes.begin(None)
        self.processes.owner, self.processes.began = sorted(owners)[0], 0.0
        jobs, text = self._conclude("deadline", 0.0, None)
        self.ends.end([p for p in left if not p.is_helper])
        first = f"nsa: {len(left)} processes would keep this session from ending, left by {', '.join(sorted(owners))}; ended"
        if jobs and not self._is_worker:
            self._write_reports(interrupted=False)
            text.append(f"  SUMMARY  {short_path(self.runner.folder.path / 'SUMMARY.md')}")
        _print([first, *map(visible, text)])
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
        """Leave Ctrl-C, subprocess and multiprocessing as they were."""
        if self._undo_signal is not None:
            self._undo_signal()
        self._undo_starts()
        with contextlib.suppress(OSError):
            self.announcer.close()
        if os.getpid() == self.pid:
            if joined_at_exit():
                # The program's own handlers of atexit come before this one, and may end these processes.
                importlib.import_module("multiprocessing.util").Finalize(None, self._finish, exitpriority=0)
            else:
                self._finish()

    def _finish(self) -> None:
        try:
            self._at_exit()
        finally:
            self.stacks.close()
            shutil.rmtree(self.base, ignore_errors=True)
