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
import pytest_timeout  # type: ignore[import-untyped]

from pytest_nsa import marked
from pytest_nsa.diagnosis.decision import decide
from pytest_nsa.diagnosis.verdict import Finding, describe_ranks
from pytest_nsa.observe.finders import list_jobs
from pytest_nsa.observe.observer import Observer, announcement
from pytest_nsa.report import run as session_report
from pytest_nsa.report import runs
from pytest_nsa.report.plain import visible
from pytest_nsa.report.terminal import short_path
from pytest_nsa.session.interrupts import at_interrupt
from pytest_nsa.session.items import Ranked
from pytest_nsa.session.runner import RankRunner
from pytest_nsa.session.started import jobs_of_test, processes
from pytest_nsa.session.started.threads import watch_exit
from pytest_nsa.settings import Mode, Settings
from pytest_nsa.system.clock import wall_clock
from pytest_nsa.system.descendants import Key, Process, children, started_since, ticks_since_boot
from pytest_nsa.wire.files import read_object

AGAIN_S = 6.0  # after which a test that is blocked in its cleanup since its limit is ended once more


def call_around_alarm(
    before: Callable[[FrameType | None], object],
    after: Callable[[], bool],
    is_blocked: Callable[[FrameType | None], bool],
) -> None:
    """Call ``before`` with the frame that SIGALRM interrupts, then pytest-timeout's handler, which is set already, then ``after``.

    Where ``after`` returns True, SIGALRM comes again every `AGAIN_S` until pytest-timeout cancels it. Then pytest-timeout's handler
    raises once more if ``is_blocked``, called with the frame, returns True.
    """
    theirs = signal.getsignal(signal.SIGALRM)
    if not callable(theirs):
        return
    is_first = True

    def fire(number: int, frame: FrameType | None) -> None:
        __tracebackhide__ = True
        nonlocal is_first
        if not is_first:
            if is_blocked(frame):
                theirs(number, frame)
            return
        is_first = False
        before(frame)
        try:
            theirs(number, frame)
        finally:
            if after():
                signal.setitimer(signal.ITIMER_REAL, AGAIN_S, AGAIN_S)

    signal.signal(signal.SIGALRM, fire)


def call_before_timer(item: pytest.Item, settings: Any, first: Callable[[FrameType | None], object]) -> None:
    """Replace pytest-timeout's timer by one that calls ``first`` with the main thread's frame, then what pytest-timeout does."""

    def fire() -> None:
        first(sys._current_frames().get(threading.main_thread().ident or 0))
        pytest_timeout.timeout_timer(item, settings)

    def cancel() -> None:
        timer.cancel()
        timer.join()

    item.cancel_timeout()  # type: ignore[attr-defined]
    item.cancel_timeout = cancel  # type: ignore[attr-defined]
    timer = threading.Timer(settings.timeout, fire)
    timer.start()


FOLDER, HOST = "NSA_TRACE_JOBS", "NSA_TRACE_HOST"  # as nsa.trace.job_folders reads them
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
        self.stacks = processes.ChildStacks(self.base)
        self.pid = os.getpid()
        self.item: pytest.Item | None = None
        self._shown: tuple[list[str], list[jobs_of_test.Concluded]] | None = None  # in the test's next report
        self.has_any = False  # the test has started a process
        self.began = 0.0  # the test, in seconds since the epoch
        self._since, self._before = ticks_since_boot(), children()  # the same in ticks; the children that existed then
        self._first = self._since, self._before
        self._earlier: list[threading.Thread] = []  # threads that ran before the first test
        self._others: set[Path] = set()  # jobs of earlier tests and of fixtures with a wider scope
        self._left_by: dict[Key, str] = {}  # the tests that have left processes
        self.interrupted: list[str] = []
        self._is_concluding = self._hooks_forks = False
        self._is_ended = False  # the test, so that its ranks are to be ended
        self._is_over = processes.is_interrupted  # whether the test has not caught what ended it
        self._is_in_phase = False  # since the test was ended
        self._failures: dict[str, bool] = {}  # of this code, and whether they have been reported
        self.ends = processes.ProcessEnds(self._to_end)
        self._undo_signal: Callable[[], None] | None = None
        self._undo_starts = processes.on_start(self._may_start, self.environment)

    # -- children

    @property
    def _is_here(self) -> bool:
        """Whether a test runs, in this process and not in a fork of it."""
        return self.item is not None and os.getpid() == self.pid

    def _may_start(self) -> bool:
        """Note that the test starts a process; return False if no test runs."""
        if not self._is_here:
            return False
        self.has_any = True
        if not self._hooks_forks and "torch.distributed" in sys.modules:
            self._hook_forks()
        return True

    @_harmless
    def _hook_forks(self) -> None:
        """Wrap torch's functions, which a forked child inherits: torch was imported without the variables."""
        importlib.import_module("nsa.trace.autostart").hook_forks()
        self._hooks_forks = True

    def _processes(self) -> list[Process]:
        """Return the processes that the test has started, and theirs."""
        return started_since(self._since, self._before, f"{HOST}={self.pid}")

    def _take_interrupt(self) -> None:
        """Take Ctrl-C before the first fixture, until the session ends: a suite may compare handlers around each test."""
        before = signal.getsignal(signal.SIGINT)
        is_taken = self._undo_signal is not None or threading.current_thread() is not threading.main_thread()
        if is_taken or before is not signal.default_int_handler:  # the program's own
            return

        def interrupted(number: int, frame: FrameType | None) -> None:
            if self._is_here and self.has_any and not self._is_concluding:
                self._at_interrupt(frame)
            before(number, frame)

        self._undo_signal = at_interrupt(interrupted)

    @_harmless
    def _at_interrupt(self, frame: FrameType | None) -> None:
        _, self.interrupted = self._conclude("interrupted", 0.0, frame)
        self._is_over = processes.is_interrupted
        self._end_soon()

    # -- a test

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        if isinstance(item, Ranked) or marked.takes(item, "launch"):
            return (yield)
        self._take_interrupt()
        self._begin(item)
        try:
            return (yield)
        finally:
            if not processes.is_interrupted():
                self.interrupted = []  # the test has caught it
            if self.has_any:
                self._after_test(item)
            self.item = None
            for failure in [failure for failure, is_reported in self._failures.items() if not is_reported]:
                self._failures[failure] = True
                jobs_of_test.warn(item, f"the processes of this test were not followed to its end: {failure}")

    @_harmless
    def _begin(self, item: pytest.Item) -> None:
        self.item, self.has_any, self._is_ended, self._is_in_phase = item, False, False, False
        self._shown = None
        self.began, self._since, self._before = wall_clock(), ticks_since_boot(), children()
        self._others = set(list_jobs(self.base))
        self._earlier = self._earlier or threading.enumerate()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
        """Exclude the jobs of a fixture with a wider scope: they serve other tests too, and are not ended with this one."""
        if fixturedef.scope == "function" or self.item is None:
            return (yield)
        before = self._jobs()
        try:
            return (yield)
        finally:
            self._exclude(before)

    @_harmless
    def _jobs(self) -> set[Path]:
        return set(list_jobs(self.base))

    @_harmless
    def _exclude(self, before: set[Path] | None) -> None:
        self._others |= set(list_jobs(self.base)) - (before or set())

    @_harmless
    def _after_test(self, item: pytest.Item) -> None:
        """End what the ended test has left; delete the evidence of jobs that have ended."""
        if self._is_ended and self._is_over():
            self.ends.finish()
        alive = [p for p in self._processes() if not p.has_ended]
        self._left_by |= {p.key: item.nodeid for p in alive}
        every = {p.pid for p in started_since(*self._first, f"{HOST}={self.pid}") if not p.has_ended}
        for job in list_jobs(self.base):
            if every.isdisjoint(jobs_of_test.list_pids(job)):
                shutil.rmtree(job, ignore_errors=True)

    # -- its time limit

    @pytest.hookimpl(wrapper=True, optionalhook=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> Generator[None, Any, Any]:
        done = yield
        # pytest-timeout raises in the test by SIGALRM; else a thread of it ends the process.
        by_alarm = settings.method == "signal" and threading.current_thread() is threading.main_thread()
        if item is self.item and by_alarm:
            call_around_alarm(
                lambda frame: self._at_limit(settings, frame),
                self._end_soon,
                # Whether the test or its fixture is still in the phase in which it was ended.
                lambda frame: self._is_in_phase and bool(jobs_of_test.find_line(frame, self.config.rootpath)),
            )
        elif item is self.item:
            call_before_timer(item, settings, lambda frame: self._at_end(item, settings, frame))
        return done

    @_harmless
    def _at_end(self, item: pytest.Item, settings: Any, frame: FrameType | None) -> None:
        """Print and write the reports, because pytest-timeout's thread then ends the process."""
        text = self._at_limit(settings, frame)
        self.ends.finish()
        if text:
            self._write_reports(interrupted=True)
            _print([f"{item.nodeid}:", *map(visible, text)])

    @_harmless
    def _at_limit(self, settings: Any, frame: FrameType | None) -> list[str]:
        is_watched = not getattr(settings, "disable_debugger_detection", False) and pytest_timeout.is_debugging()
        if is_watched or self._is_concluding or not (self._processes() or self._others):
            return []
        self.has_any = True  # also those that it has forked by itself
        jobs, text = self._conclude("deadline", settings.timeout, frame)
        self._is_over = lambda: True
        if text:
            self._shown = text, jobs
        return text

    @_harmless
    def _end_soon(self) -> bool:
        """End the ranks of the ended test, which has a little time to do so; return whether it has processes."""
        self._is_in_phase = True
        return self.ends.begin(self._is_over) or any(not p.is_helper for p in self._processes())

    def _to_end(self) -> list[Process]:
        """Return the ranks of the test, and the processes above and below them: a later test may use others (a pool's workers)."""
        ranks = {pid for job in set(list_jobs(self.base)) - self._others for pid in jobs_of_test.list_pids(job)}
        return [p for p in processes.of_ranks(self._processes(), ranks) if not p.is_helper]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        self._is_in_phase = False
        report: Any = yield
        if item is not self.item:
            return report
        if call.when == "call" and report.passed and self.has_any:
            self._at_pass(item, report)
        if call.excinfo is None or isinstance(call.excinfo.value, pytest.skip.Exception):
            return report
        if self._shown is None and self.has_any:
            self._at_failure()
        if self._shown is not None:
            jobs_of_test.add_to_report(item, report, self.runner.recorder, *self._shown)
            self._shown = None
        return report

    @_harmless
    def _at_failure(self) -> None:
        jobs, text = self._conclude("", 0.0, None)
        if jobs and jobs[0].verdict.failed and not jobs[0].is_other:
            self._shown = text, jobs

    @_harmless
    def _at_pass(self, item: pytest.Item, report: Any) -> None:
        """Report what a rank raised and the test has not noticed."""
        raised = jobs_of_test.unnoticed(self.base, self.began)
        if not raised:
            return
        if self.settings.descendants_fail:
            report.outcome, report.longrepr = "failed", f"{raised}, and the test passed (ranks_descendants_fail)"
        else:
            jobs_of_test.warn(item, f"{raised}, and the test passed (ini ranks_descendants_fail makes this a failure)")

    # -- verdicts

    def _conclude(
        self, reason: str, timeout: float, frame: FrameType | None, nodeid: str = ""
    ) -> tuple[list[jobs_of_test.Concluded], list[str]]:
        """Diagnose the jobs; if the test is being ended (``reason``), its ranks are to be ended."""
        self._is_concluding = True
        try:
            found, nodeid = self._processes(), self.item.nodeid if self.item is not None else nodeid
            root = self.config.rootpath
            occasion = jobs_of_test.Occasion(reason, nodeid, str(root), timeout, self.began, self._others)
            jobs = jobs_of_test.conclude_jobs(
                self.base, self.runner.folder, found, occasion, self.runner.extensions.rules
            )
            of_jobs = {pid for job in jobs for pid in job.pids}
            # One that has ended: a failure that the test has not waited for.
            shown = [p for p in found if not p.has_ended or (p.status and p.key not in self.ends.ended)]
            others = [p for p in shown if p.pid not in of_jobs and not p.is_helper][:NAMED]
            lines = [processes.named(p, self.stacks.places(p.pid) if reason else ()) for p in others]
            text = jobs_of_test.describe(jobs, lines, jobs_of_test.find_line(frame, root)) if jobs or others else []
            self._is_ended = self._is_ended or bool(reason)
            return jobs, text
        finally:
            self._is_concluding = False

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
        return self.settings.mode is Mode.WORKER

    @_harmless
    def _at_exit(self) -> bool:
        """End the processes that multiprocessing would wait for at exit, once they are idle; return whether there were any."""
        if os.getpid() != self.pid or not processes.joined_at_exit():
            return False
        self._since, self._before = self._first
        self.began, self._others = 0.0, set()
        limit = float(getattr(self.config, "_env_timeout", 0) or 0) or float("inf")
        waits = processes.WORKER_WAITS if self._is_worker else (processes.IDLE_S, max(limit, processes.IDLE_S))
        watched = [self._watch_at_exit(job) for job in list_jobs(self.base) if (job / "job.json").exists()]
        left = processes.left_at_exit(self._processes, *waits, watched)
        if not left:
            return False
        tests = sorted({self._left_by.get(p.key, "a fixture") for p in left})
        jobs, text = self._conclude("deadline", 0.0, None, tests[0])
        self.ends.end([p for p in left if not p.is_helper])
        first = f"nsa: {len(left)} processes would keep this session from ending, left by {', '.join(tests)}; ended"
        if jobs and not self._is_worker:
            self._write_reports(interrupted=False)
            text.append(f"  SUMMARY  {short_path(self.runner.folder.path / 'SUMMARY.md')}")
        _print([first, *map(visible, text)])
        return True

    def _watch_at_exit(self, job: Path) -> Observer:
        """Return an observer that prints, before the job's processes are ended, what keeps these from ending by themselves."""
        size = int(read_object(job / "job.json").get("world_size", 0))

        def announce(found: Finding, seconds: float, at_work: bool) -> None:
            who, what = describe_ranks(found.ranks, size), "it keeps this session from ending"
            _print([visible(announcement(found, "after the last test", who, seconds, what, at_work=at_work))])

        return Observer(job, announce=announce)

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
        if os.getpid() == self.pid:
            watch_exit(self._earlier, lambda lines: _print([visible(line) for line in lines]))
            if processes.joined_at_exit():
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
