"""What the hooks of `plugin` do in a session with ranks: each function hands over to the module of its concept."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

import pytest

from pytest_nsa import marked, marks, settings
from pytest_nsa.diagnosis.decision import Decision, decide, with_failures
from pytest_nsa.diagnosis.verdict import Verdict
from pytest_nsa.rank.context import current_rank
from pytest_nsa.rank.host_plugins import acting_on_host
from pytest_nsa.report import run as session_report
from pytest_nsa.report import runs
from pytest_nsa.report.plain import visible
from pytest_nsa.report.summary import Entry
from pytest_nsa.report.terminal import headline, short_path
from pytest_nsa.session.failure_text import HangLines, hang_line
from pytest_nsa.session.failures import Failures
from pytest_nsa.session.folders import RunFolder
from pytest_nsa.session.interrupts import Signals, signals_key
from pytest_nsa.session.items import (
    Ranked,
    RankFailure,
    folder_key,
    make_ranked,
    may_be_ranked,
    runner_key,
    skipped_key,
    timeout_key,
    verdict_key,
)
from pytest_nsa.session.launch import failed_key, launched_key
from pytest_nsa.session.masking import mask_all, mask_text
from pytest_nsa.session.needs import why_no_ranks, why_not_light
from pytest_nsa.session.plugins.forked import keep_from_forking
from pytest_nsa.session.resources import lacks_gpu
from pytest_nsa.session.runner import RankRunner
from pytest_nsa.settings import settings_key
from pytest_nsa.wire.masking import mask_with
from pytest_nsa.wire.messages import plain_nodeid
from pytest_nsa.wire.protocols import LaunchError

# What the reports were written from, for the closing lines in the terminal.
entries_key = pytest.StashKey[list[Entry]]()
decision_key = pytest.StashKey[Decision]()
problem_key = pytest.StashKey[str]()  # what is wrong with a test's marks; '' for nothing
outer_key = pytest.StashKey[Any]()  # the hooks of an outer launcher, where there is one
unwritten_key = pytest.StashKey[str]()
failures_key = pytest.StashKey[Failures]()


def begin(config: pytest.Config, *, is_late: bool) -> None:
    """Resolve the settings, and register what a session with ranks needs. Raises UsageError.

    ``is_late``: the session has started.
    """
    resolved = settings.resolve(config)
    if resolved.mask_output:
        mask_all()
        config.add_cleanup(lambda: mask_with(None))
    config.stash[signals_key] = Signals()
    config.pluginmanager.register(config.stash[signals_key], "nsa-signals")
    config.stash[failures_key] = Failures()
    config.pluginmanager.register(config.stash[failures_key], "nsa-failures")
    worker: dict[str, Any] = getattr(config, "workerinput", {})
    if not worker:
        config.pluginmanager.register(HangLines(config), "nsa-hang-lines")
    folder = RunFolder(resolved.artifacts, worker.get("nsa_run"), resolved.folder_mode)
    if config.hook.pytest_nsa_scenarios.get_hookimpls() or len(config.hook.pytest_nsa_decide.get_hookimpls()) > 1:
        folder.prefix = "test_engineer"  # a diagnostic plan
    config.stash[runner_key] = RankRunner(config, resolved, folder)
    keep_from_forking(config, _is_for_ranks)
    if resolved.zygote_fd is not None:
        from pytest_nsa.spawn.zygote import ServeSession

        config.pluginmanager.register(ServeSession(resolved.zygote_fd, resolved.listener_fd), "nsa-zygote")
    elif resolved.cold_job is not None:
        from pytest_nsa.spawn.cold import ColdSession

        config.pluginmanager.register(ColdSession(resolved.cold_job), "nsa-cold")
    elif resolved.outer is not None:
        from pytest_nsa.session.outer.hooks import OuterHooks

        config.stash[outer_key] = OuterHooks(config, resolved, resolved.outer)
        config.pluginmanager.register(config.stash[outer_key], "nsa-outer")
        if is_late:
            config.stash[outer_key].pytest_sessionstart()
    elif config.pluginmanager.hasplugin("xdist") and settings.HAS_RANKS and settings.HAS_PROC:
        from pytest_nsa.session.plugins.xdist import XdistHooks

        config.pluginmanager.register(XdistHooks(), "nsa-xdist")
    if resolved.descendants != "off" and not _is_child(config) and resolved.outer is None:
        from pytest_nsa.session.started.descendants import StartedRanks

        config.pluginmanager.register(StartedRanks(config, resolved, config.stash[runner_key]), "nsa-descendants")


def take_items(session: pytest.Session, items: list[pytest.Item]) -> None:
    """Make the collected items that ask for ranks run on them, and check the marks of all."""
    # pytest calls pytest_pycollect_makeitem for no method of a TestCase.
    items[:] = [make_ranked(i) if _is_marked(i) else i for i in items]
    session.config.stash[runner_key].extensions.take()
    for item in items:
        _check_marks(item)


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


def finish_collection(session: pytest.Session) -> None:
    """Check what the whole selection asks for; start what must be there before the first test."""
    config = session.config
    for at, item in enumerate(session.items):
        if _is_marked(item):  # another plugin's hook wrapper marked it after the marks were checked
            session.items[at] = make_ranked(item)
            _check_marks(session.items[at])
    if not hasattr(config, "workerinput"):  # under xdist no rank gets the terminal
        marks.check_debug_rank(config.stash[settings_key].debug_rank, session.items)
    wants = _wants_ranks(session)
    # An xdist worker requests ranks before it reports to the controller that it has collected.
    if hasattr(config, "workerinput") and wants:
        try:
            config.stash[runner_key].launcher.start(session, between_tests=True)
        except LaunchError as error:  # an exception would end this worker alone, and the controller replace it
            session.shouldstop = f"pytest-nsa: {error}"
    outer = config.stash.get(outer_key, None)
    if outer is None:
        return
    outer.begin(session, has_ranks=wants)
    config.stash[signals_key].defers = outer.follows
    config.stash[signals_key].take()


def describe_collection(config: pytest.Config, items: list[pytest.Item]) -> list[str] | None:
    """Return the lines below pytest's count of collected items; None without tests on ranks."""
    ranked = [item for item in items if _needs_ranks(item)]
    if not ranked or _only_lists(config) or _is_child(config):
        return None
    runner = config.stash[runner_key]
    where = short_path(runner.folder.path)
    line = f"nsa: {len(ranked)} of {len(items)} tests on ranks; ranks are {runner.launcher.plan.description}; {where}/"
    acting = acting_on_host(config) if config.option.verbose > 0 else []
    return [line, f"nsa: on the host only: {', '.join(acting)}"] if acting else [line]


def start(session: pytest.Session) -> None:
    """Start what the first test on ranks needs."""
    config = session.config
    outer = config.stash.get(outer_key, None)
    if outer is not None and not _only_lists(config):
        outer.start_clock()
    if _wants_ranks(session):
        runner = config.stash[runner_key]
        session_report.write_environment(runner.folder.path, runner.settings.gpus)
        runner.extensions.write_scenarios(runner.folder.path)
        if not hasattr(config, "workerinput"):  # else it has been started
            runner.launcher.start(session, between_tests=True)
        runner.open_debugger()
        runner.attach([item.nodeid for item in session.items if _needs_ranks(item)])
        config.stash[signals_key].take()
    if outer is not None:
        outer.note_run()


def _wants_ranks(session: pytest.Session) -> bool:
    config, items = session.config, getattr(session, "items", ())  # xdist's controller has no items before pytest 8
    return not _only_lists(config) and not _is_child(config) and any(_needs_ranks(i) for i in items)


def _only_lists(config: pytest.Config) -> bool:
    """Return whether this run only lists tests or fixtures, or only sets fixtures up: then no rank runs, nothing is written."""
    options = config.option
    is_without_calls = config.getoption("setuponly", False) or config.getoption("setupplan", False)
    return bool(options.collectonly or options.showfixtures or options.show_fixtures_per_test or is_without_calls)


def _needs_ranks(item: pytest.Item) -> bool:
    return _is_for_ranks(item) and not item.stash.get(problem_key, "") and not _why_skipped(item) and not why_no_ranks()


def _why_skipped(item: pytest.Item) -> str:
    """Return what a test needs and this machine lacks; '' for nothing."""
    if not settings.HAS_RANKS and (_is_for_ranks(item) or marked.takes(item, "artifacts")):
        return f"ranks and their evidence need Linux, and this is {sys.platform}"
    return lacks_gpu(item, item.config.stash[settings_key])


def _is_for_ranks(item: pytest.Item) -> bool:
    return isinstance(item, Ranked) or marked.takes(item, "launch")


def check_item(item: pytest.Item) -> None:
    """Fail or skip a test that cannot have what it asks for."""
    if item.stash.get(problem_key, ""):  # it alone: the others of the session run
        pytest.fail(item.stash[problem_key], pytrace=False)
    reason = _why_skipped(item)
    if reason:
        pytest.skip(reason)
    if _is_for_ranks(item) and not _is_child(item.config):
        problem = why_no_ranks() or why_not_light(item, item.config.stash[settings_key])
        if problem:
            pytest.fail(problem, pytrace=False)


def begin_item(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Note the next test; return True for a test that another process runs."""
    item.config.stash[runner_key].next_item = nextitem
    item.config.stash[signals_key].begin_test()
    outer = item.config.stash.get(outer_key, None)
    return True if outer is not None and outer.leaves_to_leader(item) else None


def take_limit(item: pytest.Item, settings: Any) -> bool | None:
    """Take the time limit of a test from pytest-timeout; return True where its clock is ours."""
    item.stash[timeout_key] = settings.timeout
    outer = item.config.stash.get(outer_key, None)
    if outer is not None:
        outer.bound(item, settings.timeout)
    return True if isinstance(item, Ranked) else None


def complete_report(item: pytest.Item, call: pytest.CallInfo[None], report: Any) -> None:
    """Put the outcome of the ranks into pytest's report, and pytest's into the verdict."""
    if report.failed:
        item.stash[failed_key] = True
    verdict = item.stash.get(verdict_key, None)
    is_of_ranks = verdict is not None and (call.when == "call" or isinstance(_raised(call), RankFailure))
    if verdict is not None and is_of_ranks and verdict.failed and hasattr(report, "wasxfail"):
        item.config.stash[runner_key].recorder.expect_failure(item.stash[folder_key], verdict)
    elif verdict is not None and is_of_ranks:
        report.nsa_outcome = verdict.outcome
        if report.skipped and skipped_key in item.stash:  # pytest reports where the host skipped: in its own code
            report.longrepr = (*item.stash[skipped_key], report.longrepr[-1])
        if verdict.outcome == "HANG" and report.failed:
            report.nsa_hang = hang_line(verdict, item)
        if call.when == "teardown":  # the call may have failed as expected
            item.config.stash[runner_key].recorder.replace(item.stash[folder_key], verdict)
        if getattr(_raised(call), "in_setup", False):
            report.when = "setup"
    verdicts = (*item.stash.get(launched_key, ()), *([verdict] if verdict else ()))
    if (is_of_ranks or call.when == "call") and report.failed and any(v.failed for v in verdicts):
        report.nsa_explained = True  # for the controller, where this is an xdist worker


def _raised(call: pytest.CallInfo[None]) -> BaseException | None:
    return call.excinfo.value if call.excinfo is not None else None


def finish(session: pytest.Session, exitstatus: int) -> None:
    """End the ranks, and write the reports."""
    config = session.config
    runner = config.stash.get(runner_key, None)
    if runner is None or current_rank() is not None or _is_child(config):
        return
    runner.close()
    if exitstatus == pytest.ExitCode.OK and session.testsfailed:  # pytest.exit(returncode=0) on a rank hides no failure
        session.exitstatus = exitstatus = pytest.ExitCode.TESTS_FAILED
    if runner.attachment is not None:
        runner.attachment.exit_status = int(exitstatus)
    follows = runner.attachment is not None and not runner.attachment.leads
    if runner.folder.is_made and not hasattr(config, "workerinput") and not follows:
        interrupted = exitstatus == pytest.ExitCode.INTERRUPTED
        if runner.settings.mask_output:
            mask_text(runner.folder.path / "zygote.log")
        try:
            _write_reports(config, interrupted=interrupted)
        except OSError as error:
            config.stash[unwritten_key] = f"SUMMARY.md and report.html could not be written: {error}"
            return
        _look_at_other_runs(runner.folder, runner.settings.keep_runs)


def _write_reports(config: pytest.Config, *, interrupted: bool) -> None:
    runner, failures = config.stash[runner_key], config.stash[failures_key]
    failures.conclude_lost(runner.folder.path, runner.recorder, runner.extensions)
    others = failures.without_verdict()
    config.stash[entries_key], config.stash[decision_key] = session_report.write_reports(
        runner.folder.path,
        runner.settings.gpus,
        lambda verdicts: with_failures(_decide(config, verdicts), verdicts, others),
        interrupted=interrupted,
    )
    failed = sum(entry.verdict.failed for entry in config.stash[entries_key]) + len(others)
    runs.finish(runner.folder.path, failed, interrupted=interrupted)


def _look_at_other_runs(folder: RunFolder, keep: int) -> None:
    """Name the newest that was cut off; delete those beyond the ``keep`` newest, unless it is 0."""
    unread: list[str] = []
    found = runs.runs_in(folder.path.parent, unread)
    if unread:
        folder.report(f"{short_path(folder.path.parent)}: left alone: {runs.in_short(unread)}")
    for path in runs.cut_off(found)[:1]:
        folder.report(f"{short_path(path)} was cut off: pytest-nsa report {short_path(path)} writes its SUMMARY.md")
    for path in runs.delete(runs.surplus(found, keep)) if keep else ():
        folder.note(f"deleted {path.name}, beyond ranks_artifacts_keep = {keep}")


def _decide(config: pytest.Config, verdicts: Mapping[str, Verdict]) -> Decision:
    """Decide by the hook; where it raises, fall back to the verdicts, and report the error."""
    try:
        found = config.hook.pytest_nsa_decide(verdicts=verdicts)
        if not isinstance(found, Decision):
            raise TypeError(f"returned {found!r}: must be a Decision of pytest_nsa, or None")
    except Exception as error:  # a conftest's error: the reports must be written all the same
        config.stash[runner_key].folder.report(f"pytest_nsa_decide failed: {type(error).__name__}: {error}")
        return decide(verdicts)
    return found


def summarize(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the decision, and where the reports are."""
    runner = config.stash[runner_key]
    entries = config.stash.get(entries_key, None)
    if unwritten_key in config.stash:
        for line in (*runner.folder.notices(), config.stash[unwritten_key]):
            terminalreporter.write_line(visible(line))
    if entries is None:
        return
    failed = [entry for entry in entries if entry.verdict.failed]
    terminalreporter.write_sep("=", "nsa diagnosis")
    if entries or config.stash[failures_key].without_verdict():
        terminalreporter.write_line(visible(config.stash[decision_key].sentence))
    for notice in runner.folder.notices():
        terminalreporter.write_line(visible(f"  {notice}"))
    shown = _in_short_summary(terminalreporter)
    for entry in failed:
        if plain_nodeid(entry.name) not in shown:
            terminalreporter.write_line(f"  {visible(entry.name)}: {headline(entry.verdict)}")
    for name in ("SUMMARY.md", "report.html"):
        terminalreporter.write_line(f"{name}: {short_path(runner.folder.path / name)}")


def _in_short_summary(terminalreporter: Any) -> set[str]:
    """Return the ids of the tests that pytest lists after this, with location and cause."""
    return {
        plain_nodeid(report.nodeid)
        for letter, kind in (("f", "failed"), ("E", "error"))
        if letter in terminalreporter.reportchars
        for report in terminalreporter.stats.get(kind, ())
    }


def _is_child(config: pytest.Config) -> bool:
    """Return whether this pytest is a zygote or a cold rank that the plugin started."""
    resolved = config.stash[settings_key]
    return resolved.zygote_fd is not None or resolved.cold_job is not None
