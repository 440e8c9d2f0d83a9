"""The command line of a child pytest that collects the same tests: this run's options, without those that write."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pytest_nsa.rank.host_plugins import find_origin, is_installed
from pytest_nsa.settings import named_plugins

ADDOPTS = "PYTEST_ADDOPTS"
# In the name of an option that names a file to write, or requests one.
_WRITES = re.compile(
    r"report|html|xml|json|csv|alluredir|log-?file|pastebin"
    r"|(?:^|-)(?:debug|dump|export|out|outfile|output|result|resultlog|results|save|autosave|store)(?:-|$)"
)


def child_arguments(config: pytest.Config, log: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command line of a child that collects the same tests as this run, and variables of its environment.

    The child repeats no option that writes: it would empty a file that this process writes to. The options of the repository under
    test are repeated, as its tests may read them.
    """
    worker: dict[str, Any] = getattr(config, "workerinput", {})
    writing = _writing_options(config)
    arguments = _without([str(a) for a in worker.get("nsa_arguments", config.invocation_params.args)], writing)
    added = list(config.getini("addopts"))
    if _without(added, writing) != added:
        arguments = ["-o", f"addopts={shlex.join(_without(added, writing))}", *arguments]
    # The child must not touch this run's cache: it would select other tests under --lf.
    if config.pluginmanager.hasplugin("cacheprovider"):
        arguments += ["-o", f"cache_dir={log.parent / '.child_cache'}"]
    if config.pluginmanager.hasplugin("xdist"):
        arguments += ["-n0"]
    if config.pluginmanager.hasplugin("randomly"):
        arguments += [f"--randomly-seed={config.getoption('randomly_seed')}"]
    if config.pluginmanager.hasplugin("pytest_cov"):
        arguments += ["--no-cov"]  # its reports are the host's; what ranks run is measured all the same
    given = os.environ.get(ADDOPTS, "")
    return arguments, {ADDOPTS: shlex.join(_without(shlex.split(given), writing))} if given else {}


def _writing_options(config: pytest.Config) -> dict[str, bool]:
    """Return the options of pytest and of installed plugins that write, and whether each takes a value."""
    _, in_ranks = named_plugins(config)
    found: dict[str, bool] = {}
    for implementation in config.hook.pytest_addoption.get_hookimpls():
        plugin = implementation.plugin
        origin, name = find_origin(config, plugin), config.pluginmanager.get_name(plugin)
        if {origin, name} & {"pytest_nsa", *in_ranks} or not is_installed(config, plugin):
            continue
        given = {"parser": (declared := _Declared()), "pluginmanager": config.pluginmanager}
        implementation.function(*(given[name] for name in implementation.argnames))
        found |= dict(declared.writing())
    return found


class _Declared:
    """What a plugin's `pytest_addoption` declares: it takes the place of pytest's parser, and of a group of options."""

    def __init__(self) -> None:
        self._options: list[tuple[tuple[str, ...], Mapping[str, Any]]] = []

    def addoption(self, *names: str, **attributes: Any) -> None:
        """Note an option."""
        self._options.append((names, attributes))

    _addoption = addoption  # as pytest's own plugins call it

    def getgroup(self, *_: Any, **__: Any) -> _Declared:
        """Return this object for any group."""
        return self

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None  # such as addini

    def writing(self) -> Iterator[tuple[str, bool]]:
        """Yield the names of options that write, and whether they take a value."""
        for names, attributes in self._options:
            named = [*names, str(attributes.get("dest", "")), str(attributes.get("metavar", ""))]
            words = (name.strip("-").replace("_", "-").lower() for name in named)
            if isinstance(attributes.get("type"), argparse.FileType) or any(map(_WRITES.search, words)):
                takes_value = attributes.get("action", "store") in ("store", "append", "extend")
                yield from ((name, takes_value) for name in names if name.startswith("--"))


def _without(arguments: Sequence[str], writing: Mapping[str, bool]) -> list[str]:
    """Return arguments without some options, and without their values."""
    kept: list[str] = []
    follows = False  # the value of an option that was taken out
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        is_value, follows = follows and not argument.startswith("-"), False
        if name in writing:
            follows = writing[name] and not equals
        elif not is_value:
            kept.append(argument)
    return kept
