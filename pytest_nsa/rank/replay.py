"""What a rank runs: the collected item by pytest's own protocol, or a function for the fixture `launch`."""

import contextlib
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from os import getpid
from pathlib import Path
from typing import Any

import pytest
from _pytest._io import TerminalWriter
from _pytest.junitxml import LogXML, xml_key
from _pytest.skipping import xfailed_key

from nsa.trace.events import record
from nsa.trace.stall.exceptions import cut, origin, record_exception
from pytest_nsa import marks
from pytest_nsa.host_fixtures import take_host_values
from pytest_nsa.rank import debugger, lockstep
from pytest_nsa.rank.context import RankContext, end_if_forked
from pytest_nsa.rank.host_plugins import remove_hooks
from pytest_nsa.settings import named_plugins
from pytest_nsa.system.disk_space import ignore_full_disk
from pytest_nsa.wire.files import append_line
from pytest_nsa.wire.messages import Job


def disable_host_calls(config: pytest.Config) -> None:
    """Make pytest-dependency's ``depends()`` fail and drop allure's steps and attachments. Once per process, before a test."""
    _, in_ranks = named_plugins(config)
    dependency, allure = sys.modules.get("pytest_dependency"), sys.modules.get("allure_commons")
    if dependency is not None and not in_ranks & {"dependency", "pytest_dependency"}:
        dependency.DependencyManager.checkDepend = _refuse_dependency
    if allure is not None and "allure_pytest" not in in_ranks:
        # A body's calls reach these through allure's own plugin manager, and would write into the host's folder of results.
        for name, plugin in allure.plugin_manager.list_name_plugin():
            if type(plugin).__name__ in ("AllureListener", "AllureFileLogger"):
                allure.plugin_manager.unregister(name=name)


def _refuse_dependency(*_: Any) -> None:
    """Replace the check, which would skip the test: no rank has the results of other tests."""
    pytest.fail(
        "pytest_dependency.depends(): a rank does not know the outcomes of other tests, so it would skip this one: use the mark "
        "dependency(depends=[...]), which the host checks",
        pytrace=False,
    )


def unwritten_inline_snapshots() -> str:
    """Return, after a test's body, the error for snapshot() calls without the right value; '' without any.

    inline-snapshot writes values into the source at the end of the host's session, which does not know a rank's values. Its own
    message promises that they are written, so its counts are reset.
    """
    module = sys.modules.get("inline_snapshot._global_state")
    if module is None:
        return ""
    state = module.state()
    is_unwritten = state.missing_values or state.incorrect_values
    state.missing_values = state.incorrect_values = 0
    return (
        "inline-snapshot: a snapshot() has no value, or not the one of this rank, and ranks write none: write it by hand, or "
        "create it in a test without ranks"
        if is_unwritten
        else ""
    )


COUNT = 4


class SpareFiles:
    """Reserved descriptors, all of one file in memory."""

    def __init__(self) -> None:
        self._held: list[int] = []
        self._inode = 0

    def hold(self) -> None:
        """Reserve `COUNT` descriptors, or fewer if there are not so many; no-op if they are reserved."""
        if self._held:
            return
        with contextlib.suppress(OSError):
            self._held.append(os.memfd_create("nsa-spare"))
            self._inode = os.fstat(self._held[0]).st_ino
            while len(self._held) < COUNT:
                self._held.append(os.dup(self._held[0]))

    def make_room(self) -> None:
        """Close them if no other descriptor is free, except those that the test has closed and opened as another file."""
        if not self._held:
            return
        try:
            os.close(os.dup(self._held[0]))
        except OSError:
            while self._held:
                fd = self._held.pop()
                with contextlib.suppress(OSError):
                    if os.fstat(fd).st_ino == self._inode:
                        os.close(fd)


# Plugins of pytest itself that use the terminal, or would take faulthandler from the rank; others are in `host_plugins`.
# pytest-cov's contexts belong to the host's measurement, which a rank replaces by one of its test alone.
REMOVED_PLUGINS = (
    "terminalreporter",
    "terminalprogress-plugin",
    "faulthandler",
    "pdbinvoke",
    "pdbtrace",
    "_cov_contexts",
)
_RECORDER = "nsa-rank-recorder"
_kept_alive: list[object] = []


@dataclass(frozen=True, kw_only=True)
class Run:
    """What every rank of a job does: ``body`` returns whether it passed; ``place`` is 'file:line in name'."""

    body: Callable[[RankContext], bool]
    place: str


def prepare(job: Job, items: Mapping[str, pytest.Item]) -> Run:
    """Return what the ranks will run. Raises LookupError with a sentence if this process cannot find it."""
    if job.function:
        module_name, _, name = job.function.partition(":")
        module = sys.modules.get(module_name)
        if module is None:
            try:
                module = importlib.import_module(module_name)
            except ImportError:
                raise LookupError(
                    f"launch({name}): module {module_name!r} is not among those that were collected"
                ) from None
        function = getattr(module, name, None)
        if not callable(function):
            raise LookupError(f"launch({name}): no function of this name at the top level of {module_name}")
        code = getattr(function, "__code__", None)
        place = f"{code.co_filename}:{code.co_firstlineno} in {name}" if code else name
        return Run(body=lambda ctx: _run_function(ctx, function), place=place)
    item = items.get(job.nodeid)
    if item is None:
        raise LookupError(f"{job.nodeid}: was not collected by the process that starts the ranks")
    path, line = marks.find_place(item)
    return Run(body=lambda ctx: _run_item(ctx, item), place=f"{path}:{line} in {item.name}")


def _run_function(ctx: RankContext, function: Callable[..., Any]) -> bool:
    from pytest_nsa.rank.handles import by_name  # it imports torch, which the process that forks ranks has not yet

    available = {**by_name(ctx), **ctx.job.arguments}
    wanted = inspect.signature(function).parameters
    try:
        function(**{name: available[name] for name in wanted if name in available})
        problem = unwritten_inline_snapshots()
        if problem:
            pytest.fail(problem, pytrace=False)
    except pytest.skip.Exception as skip:
        record(ctx.folder, event="skipped", reason=str(skip))
    except BaseException as error:
        record_exception(ctx.folder, error, "call")  # nothing, in a process that the function has forked
        traceback.print_exc()
        return False
    return True


def _run_item(ctx: RankContext, item: pytest.Item) -> bool:
    config = item.config
    make_ranks_config(config)
    recorder: RankRecorder = config.pluginmanager.getplugin(_RECORDER)
    recorder.begin(ctx)
    if ctx.job.tmp:
        _share_temporary_folder(config, Path(ctx.job.tmp))
    if lockstep.is_hypothesis_test(item):
        lockstep.prepare(ctx, item)
    take_host_values(item, ctx.job.values)
    _take_tried_values(item, ctx.job.overrides)
    # The whole protocol, not only its three phases: assertion messages and warning filters are set up by it.
    item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
    return recorder.passed


def _take_tried_values(item: pytest.Item, tried: Mapping[str, str]) -> None:
    """Replace parameters of a test by what a bisection tries, converted to their types."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    for name, text in tried.items():
        if isinstance(params.get(name), bool):
            params[name] = text.lower() in ("1", "true", "yes", "on")
        elif name in params:
            params[name] = type(params[name])(text) if isinstance(params[name], int | float) else text


def make_ranks_config(config: pytest.Config) -> None:
    """Prepare the configuration for ranks, once, best before they are forked: no capture, no host hooks, our recorder."""
    if config.pluginmanager.hasplugin(_RECORDER):
        return
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        # Output belongs in this rank's file as it is written, not in a buffer that dies with the rank.
        # The old capture is kept alive: closing it would write to files that the zygote shares.
        _kept_alive.append(capture._global_capturing)
        capture._global_capturing = None
        capture._method = "no"
        capture.start_global_capturing()
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    for stream in (sys.stdout, sys.stderr):  # UTF-8 as by pytest's own capture, whatever PYTHONIOENCODING
        stream.reconfigure(line_buffering=True, encoding="utf-8", errors="replace")  # type: ignore[union-attr]
    debugger.install()
    disable_host_calls(config)
    config.option.runxfail = True  # the host applies xfail to the test as a whole
    for name in REMOVED_PLUGINS:
        config.pluginmanager.unregister(name=name)
    remove_hooks(config)
    config.pluginmanager.register(SilentTerminal(), "terminalreporter")
    config.pluginmanager.register(RankRecorder(config), _RECORDER)


def _share_temporary_folder(config: pytest.Config, base: Path) -> None:
    """Make tmp_path the same folder on all ranks, without pytest's numbering, in which ranks would race."""
    factory = config._tmp_path_factory  # type: ignore[attr-defined]
    factory._basetemp = base
    factory._retention_policy = "all"  # no rank may delete what another still uses

    def mktemp(basename: str, numbered: bool = True) -> Path:
        folder = base / basename
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    factory.mktemp = mktemp


def _torch_skip_reason(error: BaseException) -> str:
    """Return why torch's decorators skip a test (skip_if_lt_x_gpu, requires_nccl, ...): they raise SystemExit with a known code."""
    module = sys.modules.get("torch.testing._internal.common_distributed")
    skips = getattr(module, "TEST_SKIPS", {}) if isinstance(error, SystemExit) else {}
    return next((str(skip.message) for skip in skips.values() if skip.exit_code == error.code), "")  # type: ignore[attr-defined]


def _is_expected(error: BaseException, raises: Any) -> bool:
    """Return whether ``raises`` of a mark xfail, types or a RaisesExc, names an exception."""
    matches = getattr(raises, "matches", None)
    return bool(matches(error)) if matches is not None else isinstance(error, raises)


def _suite_properties(config: pytest.Config) -> list[tuple[str, Any]]:
    """Return what `record_testsuite_property` was given in this process: in a log without a file, where there is no other."""
    if config.stash.get(xml_key, None) is None:
        config.stash[xml_key] = LogXML(os.devnull, None)
    return config.stash[xml_key].global_properties


def _first_named(item: pytest.Item, text: str) -> traceback.FrameSummary | None:
    """Return the first location that a plugin's own text names, as pytest-check's: 'test_x.py:6 in test_it() -> equal(1, 2)'."""
    for found in re.finditer(r"^(\S+):(\d+) in (\w+)", text, re.M):
        for folder in (item.config.invocation_params.dir, item.config.rootpath):
            path = folder / found[1]
            if path.is_file():
                return traceback.FrameSummary(str(path), int(found[2]), found[3], lookup_line=False)
    return None


class SilentTerminal:
    """Replaces the terminal reporter: pytest before 9 needs its writer to explain comparisons."""

    def __init__(self) -> None:
        self._tw = TerminalWriter(open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  as long as the rank lives


class RankRecorder:
    """Records each exception and report of the test at once, before teardown can hang."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.ctx: RankContext
        self._is_begun = False
        self._spare = SpareFiles()
        _suite_properties(config)  # makes the JUnit log that keeps them, before ranks are forked

    @pytest.hookimpl(tryfirst=True)
    def pytest_unconfigure(self, config: pytest.Config) -> None:
        """Forget the log that keeps properties: pytest would unregister it as a plugin, which it is not."""
        log = config.stash.get(xml_key, None)
        if log is not None and not config.pluginmanager.is_registered(log):
            del config.stash[xml_key]

    def begin(self, ctx: RankContext) -> None:
        """Reset for a test."""
        self.ctx, self._is_begun = ctx, True
        self._outcomes: set[str] = set()
        self._is_in_call = False  # then a report is a subtest's
        self._xfail: dict[str, Any] | None = None
        self._subtests: list[bool] = []  # of those that failed: whether the mark xfail expects it
        self._spare.hold()
        self._suite_properties = len(_suite_properties(self.config))

    def _new_suite_properties(self) -> list[tuple[str, str]]:
        """Return the properties that `record_testsuite_property` has added to this process's JUnit log since the last report."""
        new = _suite_properties(self.config)[self._suite_properties :]
        self._suite_properties += len(new)
        return [(str(name), str(value)) for name, value in new]

    @property
    def passed(self) -> bool:
        """Whether the test was run, and nothing of it failed."""
        return bool(self._outcomes) and "failed" not in self._outcomes

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None, Any, Any]:
        self._is_in_call = True
        self.ctx.session.board.number("call", 1)
        try:
            result = yield
        finally:
            self._is_in_call = False
            self.ctx.session.board.number("call", 2)
            problem = unwritten_inline_snapshots()
        if problem:
            pytest.fail(problem, pytrace=False)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        raised = call.excinfo
        if raised is not None or call.when != "setup":
            self._spare.make_room()
        report = yield  # pytest sets the exception that a TestCase caught; plugins fail a test for the failures they collected
        if call.excinfo is not None and lockstep.restore_own_error(call):
            error = call.excinfo.value
            reason = _torch_skip_reason(error)
            if reason:
                self._record_left("skipped", reason, error)
                report.outcome, report.longrepr = "skipped", (*marks.find_place(item), f"Skipped: {reason}")
            elif isinstance(error, pytest.skip.Exception):
                self._record_left("skipped", str(error.msg), error)
            elif isinstance(error, pytest.xfail.Exception):
                self._record_left("xfailed", str(error.msg), error)
                if self._is_in_call:  # of the whole test, it is the host's to apply
                    report.outcome, report.wasxfail = "skipped", str(error.msg)
            else:
                if is_collected := call.excinfo is not raised:
                    error = error.with_traceback(None)
                is_verdict = isinstance(error, pytest.fail.Exception) or is_collected
                self._record_failure(item, error, call.when, is_verdict)
        elif call.excinfo is None and report.failed and item.stash.get(xfailed_key, None) is None:
            self._record_failure(item, pytest.fail.Exception(report.longreprtext.strip()), call.when, True)
        if self._is_begun and getpid() != self.ctx.pid:
            if call.excinfo is not None:
                print(report.longreprtext, file=sys.stderr)
            end_if_forked(self.ctx, passed=report.outcome != "failed")
        self._xfail = self._expectation(item, call)
        return report

    def _record_failure(self, item: pytest.Item, error: BaseException, phase: str, is_of_a_plugin: bool) -> None:
        """Record what failed a phase: of pytest or a plugin at the place that its text names, or at the test."""
        place = None
        if is_of_a_plugin:
            of_the_test = traceback.FrameSummary(*marks.find_place(item), item.name, lookup_line=False)
            place = _first_named(item, str(error)) or of_the_test
        record_exception(self.ctx.folder, error, phase, place)

    def _record_left(self, event: str, reason: str, error: BaseException) -> None:
        """Record that the test skipped, or expects to fail; of a subtest, its report has that."""
        if not self._is_in_call:
            record(self.ctx.folder, event=event, reason=reason, **origin(error))

    def _expectation(self, item: pytest.Item, call: pytest.CallInfo[None]) -> dict[str, Any] | None:
        """Return what the test's mark xfail, also one that the test has added, states for this phase; None without a mark."""
        error = call.excinfo.value if call.excinfo is not None else None
        if isinstance(error, pytest.xfail.Exception):
            return {"reason": str(error.msg), "strict": False, "any": False, "expects": True}
        mark = item.stash.get(xfailed_key, None)
        if mark is None:
            return None
        expects = mark.raises is None or (error is not None and _is_expected(error, mark.raises))
        if isinstance(error, pytest.fail.Exception) and self._subtests and all(self._subtests):
            expects = True  # pytest's own failure of a test with failed subtests, each of them expected
        return {"reason": mark.reason, "strict": mark.strict, "any": mark.raises is None, "expects": expects}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        is_subtest = hasattr(report, "context")  # of pytest, or of pytest-subtests
        if is_subtest and report.failed:
            self._subtests.append(bool(self._xfail and self._xfail["expects"]))
        text = cut(str(report.longreprtext))
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        if data is not None:
            # Only the text of a failure is read; pytest's own form of it can be as long as the error.
            data["longrepr"] = None
            entry = {"text": text, "report": data, "of_the_suite": self._new_suite_properties(), "subtest": is_subtest}
            if self._xfail is not None:
                entry["xfail"] = self._xfail
            with ignore_full_disk():
                append_line(self.ctx.folder / "reports.jsonl", entry)
        self._outcomes.add(report.outcome)

    def pytest_exception_interact(self, call: pytest.CallInfo[Any]) -> None:
        if self.config.getoption("usepdb", False) and call.excinfo is not None:
            debugger.post_mortem(self.ctx, call.excinfo)

    def pytest_warning_recorded(self, warning_message: Any) -> None:
        if not self._is_begun:  # pytest replays warnings of the collection to a new plugin: the host has reported them
            return
        w = warning_message
        print(f"{w.filename}:{w.lineno}: {w.category.__name__}: {w.message}", file=sys.stderr)
        category = w.category
        record(
            self.ctx.folder,
            event="warning",
            module=category.__module__,
            category=category.__qualname__,
            message=cut(str(w.message)),
            filename=w.filename,
            lineno=w.lineno,
        )
