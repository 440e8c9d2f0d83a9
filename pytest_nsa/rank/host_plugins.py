"""Which plugins run on the host only, and which of their hooks are therefore removed in ranks.

The host reports a test once, and retries it with new ranks. A plugin that reports, retries or remembers outcomes would do so once
more in each rank. A rank still needs such a plugin's fixtures, so single hooks are removed, and never a plugin.
"""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

from pytest_nsa.settings import named_plugins

_REPORTS = frozenset({"pytest_runtest_logreport", "pytest_runtest_logstart", "pytest_runtest_logfinish"})
_PROTOCOL = "pytest_runtest_protocol"
# pytest_terminal_summary shows what pytest_sessionfinish has made.
_END = frozenset({"pytest_sessionfinish", "pytest_terminal_summary"})
# The hooks around a test. Not pytest_pyfunc_call, which runs a body, nor pytest_assertrepr_compare, which explains its asserts.
_AROUND = (
    "pytest_runtest_", "pytest_fixture_", "pytest_session", "pytest_collectreport", "pytest_exception_interact",
    "pytest_warning_recorded", "pytest_terminal_summary",
)  # fmt: skip
_OURS = frozenset({"_pytest", "pytest_nsa", "nsa"})
# They skip a test by the outcomes of others, which ranks do not know; no hook that they implement reveals that.
_BY_OUTCOMES = frozenset({"pytest_dependency", "pytest_depends"})
# pytest-timeout wraps the protocol, and sets no timer in ranks; pyfakefs wraps reports, so that they reach the real file system.
_KEPT_IN_RANKS = frozenset({"pytest_timeout", "pyfakefs"})


@dataclass(frozen=True, kw_only=True, slots=True)
class HostPlugin:
    """A plugin with hooks that run on the host only. ``origin``: its package, its module if it is the repository's own, or its path
    if it is a conftest.py; ``acts``: these are not only hooks of the session's end.
    """

    plugin: object
    origin: str
    hooks: tuple[str, ...]
    acts: bool


def remove_hooks(config: pytest.Config, *, reports_only: bool = False) -> None:
    """Remove the hooks that run on the host only from this process. With ``reports_only``, keep those that run a test: for a
    follower of an outer launcher, which makes the same retries as the leader.
    """
    for found in host_plugins(config):
        for name in found.hooks:
            if not reports_only or name in _REPORTS or name in _END:
                remove_hook(config, name, found.plugin)


def remove_hook(config: pytest.Config, name: str, plugin: object) -> None:
    """Remove a plugin's implementation of one hook. pluggy has this for whole plugins only, which would take their fixtures too."""
    getattr(config.hook, name)._remove_plugin(plugin)


def host_plugins(config: pytest.Config) -> list[HostPlugin]:
    """Return the plugins with hooks that run on the host only, by name and by the hooks that they implement."""
    on_host, in_ranks = named_plugins(config)
    manager = config.pluginmanager
    loaded = [(name, plugin) for name, plugin in manager.list_name_plugin() if plugin is not None]
    origins = {id(plugin): find_origin(config, plugin) for _, plugin in loaded}
    names: dict[str, set[str]] = {}
    with_fixtures = set()
    for name, plugin in loaded:
        origin = origins[id(plugin)]
        names.setdefault(origin, {origin}).add(name)
        if _is_conftest(plugin) or _has_fixtures(plugin):
            with_fixtures.add(origin)
    found = []
    for _, plugin in loaded:
        origin = origins[id(plugin)]
        if origin.partition(".")[0] in _OURS or names[origin] & in_ranks:
            continue
        hooks = dict(_implemented(config, plugin))
        is_named = bool(names[origin] & on_host) or origin in _BY_OUTCOMES
        if not is_named and origin in _KEPT_IN_RANKS:
            continue
        acts = is_named or any(name in _REPORTS or name == _PROTOCOL for name in hooks)
        if acts and (is_named or origin not in with_fixtures):
            theirs = [name for name in hooks if name.startswith(_AROUND)]
        elif acts:
            # Its fixtures may need what its wrappers prepare. A protocol that is no wrapper runs the test itself.
            theirs = [name for name, wraps in hooks.items() if name in _REPORTS or (name == _PROTOCOL and not wraps)]
            theirs += [name for name in hooks if theirs and name in _END]
        else:  # a child runs no test, so whatever an installed plugin wrote at the session's end would be wrong
            theirs = [name for name in hooks if name in _END and is_installed(config, plugin)]
        if theirs:
            found.append(HostPlugin(plugin=plugin, origin=origin, hooks=tuple(sorted(theirs)), acts=acts))
    return found


def acting_on_host(config: pytest.Config) -> list[str]:
    """Return the origins of the plugins that act on outcomes, and therefore run on the host only."""
    return sorted({found.origin for found in host_plugins(config) if found.acts})


class WithoutReports:
    """Registered in a child pytest of this plugin, which reports nothing. Made before plugins are configured."""

    def __init__(self, config: pytest.Config) -> None:
        # An ini file may name it. The options that write are not on a child's command line (session/launchers.py).
        config.option.log_file = os.devnull

    @pytest.hookimpl(trylast=True)  # plugins register others as they are configured
    def pytest_configure(self, config: pytest.Config) -> None:
        """Remove the host's hooks before the session starts."""
        remove_hooks(config)


def _implemented(config: pytest.Config, plugin: object) -> Iterator[tuple[str, bool]]:
    """Yield the hooks that a plugin implements, and whether it wraps others' implementations."""
    for caller in config.pluginmanager.get_hookcallers(plugin) or ():
        for implementation in caller.get_hookimpls():
            if implementation.plugin is plugin:
                yield caller.name, bool(implementation.wrapper or implementation.hookwrapper)


def _get_module(plugin: object) -> str:
    """Return the name of the module that a plugin is, or that defines it."""
    return (
        plugin.__name__
        if isinstance(plugin, ModuleType)
        else (plugin if isinstance(plugin, type) else type(plugin)).__module__
    )


def _get_file(plugin: object) -> Path | None:
    module = plugin if isinstance(plugin, ModuleType) else sys.modules.get(_get_module(plugin))
    file = getattr(module, "__file__", None)
    return Path(file) if file else None


def _is_conftest(plugin: object) -> bool:
    file = _get_file(plugin)
    return file is not None and file.name == "conftest.py"


def is_installed(config: pytest.Config, plugin: object) -> bool:
    """Return whether a plugin is installed, and not part of the repository under test."""
    file = _get_file(plugin)
    return file is not None and ("site-packages" in file.parts or not file.is_relative_to(config.rootpath))


def find_origin(config: pytest.Config, plugin: object) -> str:
    """Return the package, module or path that a plugin comes from; equal for all plugins of one package."""
    file = _get_file(plugin)
    if file is not None and _is_conftest(plugin):
        return file.relative_to(config.rootpath).as_posix() if file.is_relative_to(config.rootpath) else str(file)
    module = _get_module(plugin)
    return module.partition(".")[0] if is_installed(config, plugin) or module.startswith("_pytest.") else module


def _has_fixtures(plugin: Any) -> bool:
    members = {**vars(type(plugin)), **getattr(plugin, "__dict__", {})}
    return any(map(_is_fixture, members.values()))


def _is_fixture(member: Any) -> bool:
    """Return whether a member is what `pytest.fixture` returns; before pytest 8.4 that is a function with an attribute."""
    is_marked = isinstance(member, FunctionType) and hasattr(member, "_pytestfixturefunction")
    return is_marked or type(member).__name__ == "FixtureFunctionDefinition"
