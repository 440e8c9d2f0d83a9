"""The processes that the running test has started, and those of fixtures with a wider scope.

Not all that start during a test are its own: a fixture's executor starts its workers when a test submits work, and the thread of a
pool replaces workers that have ended.
"""

from __future__ import annotations

import os
import sys
import threading
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from pytest_nsa.system.children import children
from pytest_nsa.system.clock import wall_clock
from pytest_nsa.system.descendants import Process, Started, ticks_since_boot

EARLIER = "an earlier test or fixture"


class ProcessesOfTest:
    """``mark``: the variable, as NAME=VALUE, that they inherit. ``owner``: the test's node id, or the fixture that is made now."""

    def __init__(self, mark: str) -> None:
        self.item: pytest.Item | None = None
        self.owner = ""
        self.has_any = False
        self.began = 0.0  # the test, in seconds since the epoch
        self._started = Started(mark)
        self._since = 0  # ticks since boot
        self._before: list[int] = []  # the children that existed before the test
        self._threads: WeakKeyDictionary[threading.Thread, str] = WeakKeyDictionary()  # who has started them
        self._pid = os.getpid()

    @property
    def owners(self) -> dict[tuple[int, int], str]:
        """The owners of the processes that the last look has found, by `Process.key`."""
        return self._started.owners

    @property
    def is_here(self) -> bool:
        """Whether a test runs, in this process and not in a fork of it."""
        return self.item is not None and os.getpid() == self._pid

    def begin(self, item: pytest.Item | None) -> None:
        """Begin with a test; None: with no test, until the session's end."""
        self.item, self.owner, self.has_any = item, item.nodeid if item is not None else "", False
        self.began, self._since, self._before = wall_clock(), ticks_since_boot(), children()
        self._take_threads(EARLIER)

    def begin_fixture(self, name: str) -> list[int]:
        """Note that a fixture with a wider scope is being made. Return what `end_fixture` takes."""
        if self.has_any:
            self.look()
        self._take_threads(self.owner)
        self.owner = name
        return children()

    def end_fixture(self, before: list[int]) -> None:
        """Give to the fixture what it has started."""
        if self.has_any or children() != before:
            self.look()
        self._take_threads(self.owner)
        self.owner = self.item.nodeid if self.item is not None else ""

    def _take_threads(self, owner: str) -> None:
        for thread in threading.enumerate():
            if thread not in (threading.main_thread(), threading.current_thread()):
                self._threads.setdefault(thread, owner)

    def add(self, pid: int) -> None:
        """Note a child that has just started, by the thread that has started it."""
        thread = self._threads.get(threading.current_thread(), "")
        pools = _pools_of_fixtures(self.item) if self.item is not None else {}
        self._started.given[pid] = thread or _fixture_on(sys._getframe(), pools) or self.owner

    def look(self) -> list[Process]:
        """Return all that exist."""
        return self._started.look(self.owner, self._since, self._before)

    def of(self, owner: str) -> list[Process]:
        """Return those of an owner that no other uses: not servers of multiprocessing."""
        return [p for p in self.look() if self.owners[p.key] == owner and not p.is_helper]

    def fixture_of(self, pid: int) -> str:
        """Return the fixture that a process belongs to; '' for the test."""
        owner = next((of for (known, _), of in self.owners.items() if known == pid), self.owner)
        return "" if owner == self.owner else owner

    def of_fixtures(self) -> list[int]:
        """Return the pids of processes that are not the test's."""
        return [pid for (pid, _), owner in self.owners.items() if self.item is None or owner != self.item.nodeid]


def _pools_of_fixtures(item: pytest.Item) -> dict[int, tuple[str, Any]]:
    """Return name and value of a test's fixtures with a wider scope that are executors or pools, by the identity of the value."""
    kinds = [
        kind
        for module, name in (("concurrent.futures", "Executor"), ("multiprocessing.pool", "Pool"))
        if (kind := getattr(sys.modules.get(module), name, None)) is not None
    ]
    known = getattr(item, "_fixtureinfo", None)
    definitions = known.name2fixturedefs if known is not None else {}
    found = {}
    for name, value in getattr(item, "funcargs", {}).items():
        scope = definitions[name][-1].scope if definitions.get(name) else "function"
        if scope != "function" and isinstance(value, tuple(kinds)):
            found[id(value)] = f"{scope} fixture {name}", value
    return found


def _fixture_on(frame: FrameType | None, pools: dict[int, tuple[str, Any]]) -> str:
    """Return the fixture that is ``self`` of a function on the stack, the innermost; '' without one."""
    modules = {kind.__module__ for _, pool in pools.values() for kind in type(pool).__mro__}
    while frame is not None and pools:
        # Of these modules' frames alone: before Python 3.13 a frame that was looked at keeps its variables alive.
        if frame.f_globals.get("__name__") in modules and (found := pools.get(id(frame.f_locals.get("self")))):
            return found[0]
        frame = frame.f_back
    return ""
