"""The hooks, each a few lines. What ranks need is imported for the first test that asks for them: `session.modes`.

It is called from these hooks, and registers none of its functions, so that the order among plugins never changes.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_nsa import hookspecs, marked, marks
from pytest_nsa.fixtures import branch, ddp, fsdp, gc_range, group, is_active, rank_tmp_path, trace
from pytest_nsa.settings import add_options, is_child_process, is_launched

if TYPE_CHECKING:
    from pytest_nsa.session.launch import Launch

# Fixtures are found by name in a plugin's module.
__all__ = [
    "artifacts", "branch", "ddp", "fsdp", "gc_range", "group", "is_active", "launch", "rank_tmp_path", "trace",
]  # fmt: skip

part_key = pytest.StashKey[Any]()  # what the hooks do in a session with ranks, once one is needed
refused_key = pytest.StashKey[str]()  # why this session can have no ranks: what is wrong in its settings

_FIXTURES = ("launch", "artifacts", "trace", "branch", "gc_range", "rank_tmp_path")
_LETTERS = {"HANG": "H", "CRASH": "C", "SLOW": "L"}


class WithoutRanks:
    """What the hooks do in a session that needs no ranks: nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None

    def make_ranked(self, item: Any) -> Any:
        """Return the item unchanged."""
        return item


_without_ranks = WithoutRanks()


def _part(config: pytest.Config) -> Any:
    """Return what the hooks do in this session."""
    return config.stash.get(part_key, _without_ranks)


def _begin(config: pytest.Config, *, is_late: bool = False) -> None:
    """Resolve the settings and this process's mode, and prepare it for ranks, once. Raises UsageError."""
    if part_key not in config.stash:
        from pytest_nsa.session.modes import begin

        config.stash[part_key] = begin(config, is_late=is_late)


def _begin_or_refuse(config: pytest.Config, *, is_late: bool = True) -> None:
    """As `_begin`; what is wrong in the settings becomes an error of each test that asks for ranks."""
    try:
        if refused_key not in config.stash:
            _begin(config, is_late=is_late)
    except pytest.UsageError as error:
        config.stash[refused_key] = str(error)


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(hookspecs)


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    if is_child_process():
        from pytest_nsa.rank.host_plugins import WithoutReports

        config.pluginmanager.register(WithoutReports(config), "nsa-without-reports")


def pytest_configure(config: pytest.Config) -> None:
    for rule in marks.RULES.values():
        config.addinivalue_line("markers", rule.describe())
    follows_children = config.getoption("--ranks-descendants") or config.getini("ranks_descendants") != "off"
    if is_child_process() or follows_children or (is_launched() and marked.has_asked(config)):
        _begin(config)
    elif getattr(config.option, "dist", "no") != "no" and not hasattr(config, "workerinput"):
        # The controller of xdist collects nothing, and its workers need what it offers.
        _begin_or_refuse(config, is_late=False)


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Let a fixture of any other plugin win over ours of the same name, whichever is loaded first."""
    manager = session._fixturemanager
    find = manager.getfixturedefs

    def find_ours_last(argname: str, node: Any) -> Any:
        found = find(argname, node)
        return found and sorted(found, key=lambda definition: not _is_ours(definition))  # the last one wins

    root: Any = session if pytest.version_tuple >= (8,) else session.nodeid
    if any(len(find(name, root) or ()) > 1 for name in (*__all__, "pytest_nsa_plugin")):
        manager.getfixturedefs = find_ours_last  # type: ignore[method-assign]


def _is_ours(definition: pytest.FixtureDef[Any]) -> bool:
    return getattr(definition.func, "__module__", "") in ("pytest_nsa.fixtures", __name__)


@pytest.fixture
def launch(request: pytest.FixtureRequest) -> Iterator[Launch]:
    """Run a top-level function on ranks: `outcome = launch(body, world_size=2, timeout=20)`; read `outcome.verdict`.

    The function may take any of rank, world_size, device, group, ddp, fsdp, trace, artifacts, and what ``arguments`` names
    (values that JSON can hold). With ``backend=None`` it makes its group; with ``reruns`` a failure
    runs once more, to find where its ranks part. The test itself stays on the host.
    """
    from pytest_nsa.session.launch import launching

    yield from launching(request)


@pytest.fixture
def artifacts(request: pytest.FixtureRequest) -> Path:
    """The folder of this test's evidence, kept with the run; the same path on all ranks."""
    from pytest_nsa.session.launch import find_artifacts

    return find_artifacts(request)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marks.parametrize(metafunc)


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> Generator[None, Any, Any]:
    collected: Any = yield
    if isinstance(collected, list):
        return [_on_ranks(item) for item in collected]
    return _on_ranks(collected)


def _on_ranks(item: Any) -> Any:
    """Return the ranked form of an item that asks for ranks, other items unchanged."""
    if type(item) is not pytest.Function or not marked.is_ranked(item):
        return item
    _begin_or_refuse(item.config)
    return _part(item.config).make_ranked(item)


@pytest.hookimpl(trylast=True)  # a conftest may have marked them in the same hook
def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> None:
    config = session.config
    if any(_asks(item) for item in items):
        _begin_or_refuse(config)
    _part(config).take_items(session, items)


def _asks(item: pytest.Item) -> bool:
    """Return whether a test asks for something of this plugin: ranks, a fixture, or a mark that is ours."""
    if marked.is_ranked(item) or any(marked.takes(item, name) for name in _FIXTURES):
        return True
    is_one_of_ours = any(marked.is_ours(mark) for mark in item.iter_markers())
    return is_one_of_ours or (is_launched() and marked.has_asked(item))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    if any(marked.is_ranked(item) for item in session.items):  # another plugin's hook wrapper has marked it
        _begin_or_refuse(session.config)
    _part(session.config).finish_collection(session)


def pytest_report_collectionfinish(config: pytest.Config, items: list[pytest.Item]) -> list[str] | None:
    described: list[str] | None = _part(config).describe_collection(items)
    return described


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, Any, Any]:
    _part(session.config).start(session)
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if refused_key in item.config.stash and _asks(item):
        pytest.fail(item.config.stash[refused_key], pytrace=False)
    _part(item.config).check_item(item)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    is_left: bool | None = _part(item.config).begin_item(item, nextitem)
    return is_left


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """pytest-timeout's clock for tests on ranks is ours: it bounds the ranks, not the host that waits for them."""
    is_ours: bool | None = _part(item.config).take_limit(item, settings)
    return is_ours


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report: Any = yield
    _part(item.config).complete_report(item, call, report)
    return report


def pytest_report_teststatus(report: Any) -> tuple[str, str, str] | None:
    outcome = getattr(report, "nsa_outcome", "")
    if getattr(report, "when", "") == "call" and report.failed and outcome in _LETTERS:
        return "failed", _LETTERS[outcome], outcome
    return None


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> Generator[None, None, None]:
    try:
        return (yield)
    finally:  # the reports are written where a signal interrupts another plugin
        _part(session.config).finish(session, exitstatus)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    _part(config).summarize(terminalreporter)
