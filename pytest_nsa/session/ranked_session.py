"""What the hooks of `plugin` do in a session with ranks, by the mode of the process: each method hands over to the module of its
concept.
"""

import sys
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

import pytest

from pytest_nsa import marked, marks
from pytest_nsa.diagnosis.decision import Decision, decide, with_failures
from pytest_nsa.diagnosis.verdict import Verdict
from pytest_nsa.rank.context import current_rank
from pytest_nsa.rank.host_plugins import acting_on_host
from pytest_nsa.report import run as session_report
from pytest_nsa.report import runs
from pytest_nsa.report.frame import annotate
from pytest_nsa.report.plain import visible
from pytest_nsa.report.summary import Entry
from pytest_nsa.report.terminal import headline, short_path
from pytest_nsa.session.folders import RunFolder
from pytest_nsa.session.interrupts import Signals, signals_key
from pytest_nsa.session.items import (
    Ranked,
    RankFailure,
    folder_key,
    func_only_key,
    make_ranked,
    may_be_ranked,
    runner_key,
    skipped_key,
    timeout_key,
    verdict_key,
)
from pytest_nsa.session.launch import failed_key, launched_key
from pytest_nsa.session.masking import mask_all, mask_text
from pytest_nsa.session.needs import lacks_gpu, why_no_ranks, why_not_light
from pytest_nsa.session.other_plugins import XdistHooks, keep_from_forking
from pytest_nsa.session.reports import Failures, HangLines, hang_line
from pytest_nsa.session.runner import Group, RankRunner
from pytest_nsa.settings import HAS_PROC, HAS_RANKS, Settings, is_on_github, settings_key
from pytest_nsa.wire.masking import mask_with
from pytest_nsa.wire.messages import plain_nodeid

# What the reports were written from, for the closing lines in the terminal.
entries_key = pytest.StashKey[list[Entry]]()
decision_key = pytest.StashKey[Decision]()
problem_key = pytest.StashKey[str]()  # what is wrong with a test's marks; '' for nothing
unwritten_key = pytest.StashKey[str]()


class RankedSession:
    """A session of a process that starts all ranks of its tests: pytest alone, or the controller of xdist."""

    has_terminal = True
    writes_reports = True

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        self.config, self.settings = config, settings
        if settings.mask_output:
            mask_all()
            config.add_cleanup(lambda: mask_with(None))
        self.signals, self.failures = Signals(), Failures()
        config.stash[signals_key] = self.signals
        config.pluginmanager.register(self.signals, "nsa-signals")
        config.pluginmanager.register(self.failures, "nsa-failures")
        folder = RunFolder(settings.artifacts, getattr(config, "workerinput", {}).get("nsa_run"))
        if config.hook.pytest_nsa_scenarios.get_hookimpls() or config.hook.pytest_nsa_decide.get_hookimpls():
            folder.prefix = "test_engineer"  # a diagnostic plan
        self.runner = RankRunner(config, settings, folder, self.make_group())
        config.stash[runner_key] = self.runner
        keep_from_forking(config, _is_for_ranks)
        self.register()

    def make_group(self) -> Group:
        """Return with which processes this one runs the ranks of a test."""
        return Group()

    def register(self) -> None:
        """Register the plugins of this mode."""
        self.register_hang_lines()
        if self.config.pluginmanager.hasplugin("xdist") and HAS_RANKS and HAS_PROC:
            self.config.pluginmanager.register(XdistHooks(), "nsa-xdist")
        self.follow_started()

    def register_hang_lines(self) -> None:
        """Register what writes the line of a hang below pytest's progress letter."""
        self.config.pluginmanager.register(HangLines(self.config), "nsa-hang-lines")

    def follow_started(self) -> None:
        """Follow the processes that tests start by themselves, if that is requested."""
        if self.settings.descendants != "off":
            from pytest_nsa.session.started.descendants import StartedRanks

            self.config.pluginmanager.register(StartedRanks(self.config, self.settings, self.runner), "nsa-descendants")

    # -- collection

    def make_ranked(self, item: pytest.Function) -> Ranked:
        """Return the ranked form of an item that asks for ranks."""
        return make_ranked(item)

    def take_items(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        """Make the collected items that ask for ranks run on them, and check the marks of all."""
        # pytest calls pytest_pycollect_makeitem for no method of a TestCase.
        items[:] = [make_ranked(i) if _is_marked(i) else i for i in items]
        self.runner.extensions.take()
        for item in items:
            _check_marks(item)

    def finish_collection(self, session: pytest.Session) -> None:
        """Check what the whole selection asks for."""
        for at, item in enumerate(session.items):
            if _is_marked(item):  # another plugin's hook wrapper marked it after the marks were checked
                session.items[at] = make_ranked(item)
                _check_marks(session.items[at])
        if self.has_terminal:
            marks.check_debug_rank(self.settings.debug_rank, session.items)

    def describe_collection(self, items: list[pytest.Item]) -> list[str] | None:
        """Return the lines below pytest's count of collected items; None without tests on ranks."""
        ranked = [item for item in items if needs_ranks(item)]
        if not ranked or only_lists(self.config):
            return None
        where = short_path(self.runner.folder.path)
        are_launched = not any(isinstance(item, Ranked) for item in ranked)
        number = f"{len(ranked)} of {len(items)} tests {'may launch ranks' if are_launched else 'on ranks'}"
        line = f"nsa: {number}; ranks are {self.runner.launcher.plan.description}; {where}/"
        acting = acting_on_host(self.config) if self.config.option.verbose > 0 else []
        return [line, f"nsa: on the host only: {', '.join(acting)}"] if acting else [line]

    def wants_ranks(self, session: pytest.Session) -> bool:
        """Return whether this process starts ranks."""
        items = getattr(session, "items", ())  # xdist's controller has no items before pytest 8
        return not only_lists(self.config) and any(needs_ranks(i) for i in items)

    # -- tests

    def start(self, session: pytest.Session) -> None:
        """Start what the first test on ranks needs."""
        if self.wants_ranks(session):
            session_report.write_environment(self.runner.folder.path, self.settings.gpus)
            self.runner.extensions.write_scenarios(self.runner.folder.path)
            self.start_ranks(session)
            self.signals.take()

    def start_ranks(self, session: pytest.Session) -> None:
        """Start the process from which ranks are forked, and lend the terminal to ranks."""
        self.runner.launcher.start(session, between_tests=True)
        self.runner.open_debugger()

    def check_item(self, item: pytest.Item) -> None:
        """Fail or skip a test that cannot have what it asks for."""
        if item.stash.get(problem_key, ""):  # it alone: the others of the session run
            pytest.fail(item.stash[problem_key], pytrace=False)
        reason = _why_skipped(item)
        if reason:
            pytest.skip(reason)
        if _is_for_ranks(item):
            self.check_ranked(item)

    def check_ranked(self, item: pytest.Item) -> None:
        """Fail a test on ranks that cannot have any."""
        problem = why_no_ranks() or why_not_light(item, self.settings)
        if problem:
            pytest.fail(problem, pytrace=False)

    def begin_item(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        """Note the next test; return True for a test that another process runs."""
        self.runner.next_item = nextitem
        self.signals.begin_test()
        return None

    def take_limit(self, item: pytest.Item, limit: Any) -> bool | None:
        """Take the time limit of a test from pytest-timeout; return True where its clock is ours."""
        item.stash[timeout_key], item.stash[func_only_key] = limit.timeout, bool(limit.func_only)
        return True if isinstance(item, Ranked) else None

    def complete_report(self, item: pytest.Item, call: pytest.CallInfo[None], report: Any) -> None:
        """Put the outcome of the ranks into pytest's report, and pytest's into the verdict."""
        if report.failed:
            item.stash[failed_key] = True
        verdict = item.stash.get(verdict_key, None)
        is_of_ranks = verdict is not None and (call.when == "call" or isinstance(_raised(call), RankFailure))
        if verdict is not None and is_of_ranks and verdict.failed and hasattr(report, "wasxfail"):
            self.runner.recorder.expect_failure(item.stash[folder_key], verdict)
        elif verdict is not None and is_of_ranks:
            report.nsa_outcome = verdict.outcome
            if report.skipped and skipped_key in item.stash:  # pytest reports where the host skipped: in its own code
                report.longrepr = (*item.stash[skipped_key], report.longrepr[-1])
            if verdict.outcome == "HANG" and report.failed:
                report.nsa_hang = hang_line(verdict, item)
            if call.when == "teardown":  # the call may have failed as expected
                self.runner.recorder.replace(item.stash[folder_key], verdict)
            if getattr(_raised(call), "in_setup", False):
                report.when = "setup"
        verdicts = (*item.stash.get(launched_key, ()), *([verdict] if verdict else ()))
        if (is_of_ranks or call.when == "call") and report.failed and any(v.failed for v in verdicts):
            report.nsa_explained = True  # for the controller, where this is an xdist worker

    # -- the end

    def finish(self, session: pytest.Session, exitstatus: int) -> None:
        """End the ranks, and write the reports."""
        with self.signals.ignored():
            self._finish(session, exitstatus)

    def _finish(self, session: pytest.Session, exitstatus: int) -> None:
        if current_rank() is not None:
            return
        self.runner.close()
        # pytest.exit(returncode=0) on a rank hides no failure.
        if exitstatus == pytest.ExitCode.OK and session.testsfailed:
            session.exitstatus = exitstatus = pytest.ExitCode.TESTS_FAILED
        self.runner.group.exit_status = int(exitstatus)
        folder = self.runner.folder
        if not folder.is_made or not self.writes_reports:
            return
        if self.settings.mask_output:
            mask_text(folder.path / "zygote.log")
        try:
            self._write_reports(interrupted=exitstatus == pytest.ExitCode.INTERRUPTED)
        except OSError as error:
            self.config.stash[unwritten_key] = f"SUMMARY.md and report.html could not be written: {error}"
            return
        _look_at_other_runs(folder, self.settings.keep_runs)

    def _write_reports(self, *, interrupted: bool) -> None:
        config, run = self.config, self.runner.folder.path
        self.failures.conclude_lost(run, self.runner.recorder, self.runner.extensions)
        others = self.failures.without_verdict()
        config.stash[entries_key], config.stash[decision_key] = session_report.write_reports(
            run,
            self.settings.gpus,
            lambda verdicts: with_failures(_decide(config, verdicts), verdicts, others),
            interrupted=interrupted,
        )
        failed = sum(entry.verdict.failed for entry in config.stash[entries_key]) + len(others)
        runs.finish(run, failed, interrupted=interrupted)

    def summarize(self, terminalreporter: Any) -> None:
        """Print the decision, and where the reports are."""
        folder, stash = self.runner.folder, self.config.stash
        entries = stash.get(entries_key, None)
        if unwritten_key in stash:
            for line in (*folder.notices(), stash[unwritten_key]):
                terminalreporter.write_line(visible(line))
        if entries is None:
            return
        failed = [entry for entry in entries if entry.verdict.failed]
        terminalreporter.write_sep("=", "nsa diagnosis")
        if entries or self.failures.without_verdict():
            terminalreporter.write_line(visible(stash[decision_key].sentence))
        for notice in folder.notices():
            terminalreporter.write_line(visible(f"  {notice}"))
        shown = _in_short_summary(terminalreporter)
        for entry in failed:
            if plain_nodeid(entry.name) not in shown:
                terminalreporter.write_line(f"  {visible(entry.name)}: {headline(entry.verdict)}")
        for name in ("SUMMARY.md", "report.html"):
            terminalreporter.write_line(f"{name}: {short_path(folder.path / name)}")
        for entry in failed if is_on_github() else ():
            for line in annotate(entry.verdict, entry.name):
                terminalreporter.write_line(line)


class WorkerSession(RankedSession):
    """A worker of xdist: it uses the controller's run folder and zygote, has no terminal, and writes no reports."""

    has_terminal = False
    writes_reports = False

    def register(self) -> None:
        """Register the plugins of this mode."""
        self.follow_started()

    def finish_collection(self, session: pytest.Session) -> None:
        """Request ranks before this worker reports to the controller that it has collected."""
        super().finish_collection(session)
        if self.wants_ranks(session):
            self.runner.launcher.start(session, between_tests=True)

    def start_ranks(self, session: pytest.Session) -> None:
        """No-op: they have been requested."""


class ChildSession(RankedSession):
    """A child pytest that the plugin started, in which the zygote or a cold rank takes the place of the test loop."""

    writes_reports = False

    def register(self) -> None:
        """Register what takes the place of the test loop."""
        self.register_hang_lines()
        from pytest_nsa.spawn.zygote import ColdSession, ServeSession  # other processes do without

        if self.settings.zygote_fd is not None:
            serve = ServeSession(self.settings.zygote_fd, self.settings.listener_fd)
            self.config.pluginmanager.register(serve, "nsa-zygote")
        elif self.settings.cold_job is not None:
            self.config.pluginmanager.register(ColdSession(self.settings.cold_job), "nsa-cold")

    def wants_ranks(self, session: pytest.Session) -> bool:
        """Return False: it is where ranks come from."""
        return False

    def describe_collection(self, items: list[pytest.Item]) -> list[str] | None:
        """Return None: the process that started this one describes it."""
        return None

    def check_ranked(self, item: pytest.Item) -> None:
        """No-op: the process that started this one has checked it."""

    def finish(self, session: pytest.Session, exitstatus: int) -> None:
        """No-op: the process that started this one reports."""


def _is_marked(item: pytest.Item) -> TypeGuard[pytest.Function]:
    """Return whether an item requests ranks and does not run on them yet."""
    if not isinstance(item, pytest.Function) or isinstance(item, Ranked):
        return False
    return may_be_ranked(item) and marked.is_ranked(item)


def _check_marks(item: pytest.Item) -> None:
    extensions = item.config.stash[runner_key].extensions
    other = _refuse_snapshots(item) if isinstance(item, Ranked) else marks.other_plugin_warnings(item)
    wrong = (*marks.wrong_marks(item), *extensions.wrong_scenario(item), *marks.rank_problems(item), *other)
    item.stash[problem_key] = "\n".join(wrong)


def _refuse_snapshots(item: Ranked) -> Iterator[str]:
    """Yield an error message for a ranked test that takes syrupy's fixture: each rank would write the same file.

    The run then updates no snapshot, as syrupy would delete those of the refused test.
    """
    if getattr(item.config, "_syrupy", None) is not None and "snapshot" in item.fixturenames:
        item.config.option.update_snapshots = False
        yield (
            f"{marks.named(item)}: takes syrupy's 'snapshot', which ranks do not write: assert on values, or compare what "
            "launch(...).output(rank) returns in a test without ranks; this run updates no snapshot"
        )


def only_lists(config: pytest.Config) -> bool:
    """Return whether this run only lists tests or fixtures, or only sets fixtures up: then no rank runs, nothing is written."""
    options = config.option
    is_without_calls = config.getoption("setuponly", False) or config.getoption("setupplan", False)
    return bool(options.collectonly or options.showfixtures or options.show_fixtures_per_test or is_without_calls)


def needs_ranks(item: pytest.Item) -> bool:
    return _is_for_ranks(item) and not item.stash.get(problem_key, "") and not _why_skipped(item) and not why_no_ranks()


def _why_skipped(item: pytest.Item) -> str:
    """Return what a test needs and this machine lacks; '' for nothing."""
    if not HAS_RANKS and (_is_for_ranks(item) or marked.takes(item, "artifacts")):
        return f"ranks and their evidence need Linux, and this is {sys.platform}"
    return lacks_gpu(item, item.config.stash[settings_key])


def _is_for_ranks(item: pytest.Item) -> bool:
    return isinstance(item, Ranked) or marked.takes(item, "launch")


def _raised(call: pytest.CallInfo[None]) -> BaseException | None:
    return call.excinfo.value if call.excinfo is not None else None


def _look_at_other_runs(folder: RunFolder, keep: int) -> None:
    """Name the newest that was cut off; delete those beyond the ``keep`` newest, unless it is 0."""
    found = runs.list_runs(folder.path.parent)
    for path in runs.cut_off(found)[:1]:
        folder.report(f"{short_path(path)} was cut off: pytest-nsa report {short_path(path)} writes its SUMMARY.md")
    for path in runs.delete(runs.surplus(found, keep)) if keep else ():
        folder.note(f"deleted {path.name}, beyond ranks_artifacts_keep = {keep}")


def _decide(config: pytest.Config, verdicts: Mapping[str, Verdict]) -> Decision:
    """Decide by the hook; where it raises, fall back to the verdicts, and report the error."""
    try:
        found = config.hook.pytest_nsa_decide(verdicts=verdicts)
        if found is None:
            return decide(verdicts)
        if not isinstance(found, Decision):
            raise TypeError(f"returned {found!r}: must be a Decision of pytest_nsa, or None")
    except Exception as error:  # a conftest's error: the reports must be written all the same
        config.stash[runner_key].folder.report(f"pytest_nsa_decide failed: {type(error).__name__}: {error}")
        return decide(verdicts)
    return found


def _in_short_summary(terminalreporter: Any) -> set[str]:
    """Return the ids of the tests that pytest lists after this, with location and cause."""
    return {
        plain_nodeid(report.nodeid)
        for letter, kind in (("f", "failed"), ("E", "error"))
        if letter in terminalreporter.reportchars
        for report in terminalreporter.stats.get(kind, ())
    }
