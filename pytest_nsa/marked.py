"""What the marks and fixtures of a test request; `pytest_nsa.marks` declares and checks them."""

import random
import re
from types import FunctionType, ModuleType
from typing import Any

import pytest

RANK_FIXTURES = ("ddp", "fsdp", "group")
DEFAULT_WORLD_SIZE = 2
SIZE = "ranks_of_world_size"  # the parameter of a test that runs on several numbers of ranks


class OurMark(pytest.Mark):  # type: ignore[misc]  # final, so that no type checker misses a mark
    """A mark that a decorator of `pytest_nsa` made. Other suites have marks of the same names."""


def is_ours(mark: pytest.Mark) -> bool:
    """Return whether a decorator of `pytest_nsa` made the mark."""
    return isinstance(mark, OurMark)


def counts(item: pytest.Item, mark: pytest.Mark) -> bool:
    """Return whether a mark with a name of ours has an effect on a test: it is ours, or the test runs ranks."""
    return is_ours(mark) or is_ranked(item) or takes(item, "launch")


_asked_key = pytest.StashKey[dict[str, bool]]()


def has_asked(of: pytest.Item | pytest.Config) -> bool:
    """Return whether a repository asks for ranks: by ini ranks_marks, or by an import of `pytest_nsa`.

    The import is in a test's module, in a conftest.py, or in another plugin.
    """
    config = of if isinstance(of, pytest.Config) else of.config
    try:
        if config.getini("ranks_marks"):
            return True
    except ValueError:  # reported with the other settings, where a test asks for ranks
        return True
    modules = [plugin for plugin in config.pluginmanager.get_plugins() if isinstance(plugin, ModuleType)]
    known = config.stash.setdefault(_asked_key, {})
    own = None if isinstance(of, pytest.Config) else getattr(of.getparent(pytest.Module), "_obj", None)
    return any(_imports_us(module, known) for module in (own, *modules) if module is not None)


def _imports_us(module: ModuleType, known: dict[str, bool]) -> bool:
    """Return whether a module has a name from `pytest_nsa`; ``known`` has what was found before, by the module's name."""
    name = getattr(module, "__name__", "")
    if name not in known:
        known[name] = not _is_from_us(name) and any(
            _is_from_us(_get_origin(value)) for value in [*vars(module).values()]
        )
    return known[name]


def _get_origin(value: Any) -> str:
    # By its type alone: a module may hold proxies, which raise when their class is looked up.
    if issubclass(type(value), ModuleType):
        return str(value.__name__)
    return str(value.__module__ if issubclass(type(value), type | FunctionType) else type(value).__module__)


def _is_from_us(name: str) -> bool:
    return name.partition(".")[0] == __package__


def get_sizes(mark: pytest.Mark) -> tuple[Any, ...]:
    """Return the numbers of ranks that a mark names: world_size(2), world_size(1, 2, 4), or other suites' world_size([1, 2, 4])."""
    first = mark.args[0] if len(mark.args) == 1 else None
    return tuple(first) if isinstance(first, list | tuple) else mark.args


def get_memory(mark: pytest.Mark) -> int | None:
    """Return the bytes that a test needs on each of its GPUs, as in ``gpu(memory='8GiB')``; None for any other form."""
    found = re.fullmatch(r"([1-9]\d{0,6}) ?(MiB|GiB)", str(mark.kwargs.get("memory", "")))
    return int(found[1]) << (30 if found[2] == "GiB" else 20) if found else None


def get_size(item: pytest.Item, default: int) -> int:
    """Return how many ranks a test runs on; ``default`` where its marks name no number."""
    chosen = getattr(getattr(item, "callspec", None), "params", {}).get(SIZE)
    mark = item.get_closest_marker("world_size")
    sizes = (chosen,) if chosen is not None else get_sizes(mark) if mark is not None else ()
    return sizes[0] if sizes else default


def makes_its_own_group(item: pytest.Item) -> bool:
    """Return whether a test's ranks are in no group until it makes one."""
    mark = item.get_closest_marker("world_size")
    return mark is not None and mark.kwargs == {"group": None}


def takes(item: pytest.Item, fixture: str) -> bool:
    """Whether a test takes the plugin's fixture of this name: not its own fixture, or parameter, that has the same name."""
    if fixture not in getattr(item, "fixturenames", ()):
        return False
    info: Any = getattr(item, "_fixtureinfo", None)
    for definition in reversed(info.name2fixturedefs.get(fixture, ()) if info is not None else ()):
        if getattr(definition.func, "__module__", "").partition(".")[0] == __package__:
            return True
        if fixture not in definition.argnames:
            return False
    return True  # not defined: the plugin refuses it


def is_ranked(item: pytest.Item) -> bool:
    """Whether the test's body runs on ranks: by a rank fixture, or the mark world_size where that is ours or asked for."""
    mark = item.get_closest_marker("world_size")
    return (mark is not None and (is_ours(mark) or has_asked(item))) or any(takes(item, name) for name in RANK_FIXTURES)


def get_environment(item: pytest.Item) -> dict[str, str]:
    """Return the variables of the test's ranks: a mark on the function wins over its class's and its module's."""
    found: dict[str, str] = {}
    for mark in item.iter_markers("rank_env"):
        found = {**mark.kwargs, **found}
    return found


def get_hash_seeds(item: pytest.Item, world_size: int) -> tuple[int, ...]:
    """Return the hash seed of each rank, drawn at random if the mark names no seeds; () without the mark."""
    mark = item.get_closest_marker("hash_seeds")
    if mark is None:
        return ()
    return mark.args or tuple(random.SystemRandom().sample(range(1, 1 << 32), world_size))


def get_traces(item: pytest.Item) -> tuple[str, ...]:
    """Return what the fixture `trace` records, by the mark `trace_kinds` or `trace`; () without a mark."""
    marks = (item.get_closest_marker(name) for name in ("trace_kinds", "trace"))
    return next((mark.args for mark in marks if mark is not None), ())


def reuse_scope(item: pytest.Item) -> str:
    """The id of the class or module whose tests share their ranks; '' without the mark."""
    return next((node.nodeid for node, _ in item.iter_markers_with_node("reuse")), "")


def value(item: pytest.Item, name: str, default: Any = None) -> Any:
    """The first argument of the closest mark ``name``, or ``default``."""
    mark = item.get_closest_marker(name)
    return mark.args[0] if mark is not None and mark.args else default


def option(item: pytest.Item, name: str, keyword: str, default: Any = None) -> Any:
    """A keyword of the closest mark ``name``, or ``default``."""
    mark = item.get_closest_marker(name)
    return mark.kwargs.get(keyword, default) if mark is not None else default
