"""Record which keys of a store the main thread waits for, whether it polls a store, and at which lines keys are set."""

import itertools
import re
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from nsa.trace.board import Board
from nsa.trace.calls.arguments import keys_of_call
from nsa.trace.calls.limits import limit_of_call, limit_of_group
from nsa.trace.files import wall_clock
from nsa.trace.frames import call_path

LOOKS_AGAIN_S = 2.0  # between two looks of one loop that polls a store
_WAITS = ("wait", "get", "queue_pop")
# Not wrapped in the class Store: torch would take the wrappers for overrides of a store written in Python.
_WAITS_OF_A_CLASS = ("multi_get", "barrier")
_LOOKS = ("check", "add", "num_keys", "list_keys", "queue_len")
_SETS = ("set", "append", "compare_set", "multi_set", "queue_push")
_MOST_USES = 64  # lines and kinds of keys, for each of which the first and the last key is recorded
_STORES = ("PrefixStore", "TCPStore", "FileStore", "HashStore")


class Limit:
    """The time at which the main thread's current wait ends by its limit, on the board; 0 without a limit."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self.until = 0.0

    def set(self, until: float) -> None:
        self.until = until
        self._board.number("limit_time", until)


class KeysSet:
    """The last key of each kind that each line set.

    Keys are of one kind if they differ only in numbers. A line in a helper may set keys of several kinds.
    """

    def __init__(self) -> None:
        self._latest: dict[tuple[str, str], str] = {}

    def add(self, key: str, site: str) -> bool:
        """Record a key; return whether it is the first one of its kind at this line."""
        at = site, re.sub(r"\d+", "#", key)
        is_first = at not in self._latest
        if not key or not site or (is_first and len(self._latest) == _MOST_USES):
            return False
        self._latest[at] = key
        return is_first

    def rows(self) -> list[tuple[str, str]]:
        """Return (key, line) of each line and kind."""
        return [(key, site) for (site, _), key in list(self._latest.items())]


class StoreRecorder:
    """Wraps the methods of torch's stores in this process for as long as the process lives."""

    def __init__(self, board: Board, limit: Limit) -> None:
        self._board, self._limit = board, limit
        self.forget()

    def forget(self) -> None:
        """Reset for another test on a new board."""
        self._looked = 0.0  # when the main thread last queried a store
        self._key = ""  # the keys that the main thread waits for, or queried last
        self.keys_set = KeysSet()
        # Called with key and line: at the first key that a line sets, and at the end of the test with the last one.
        self.on_set: Callable[[str, str], None] = lambda *_: None
        self.on_call: Callable[[dict[str, Any]], None] | None = None  # each key that is set or awaited

    def install(self) -> None:
        """Replace the methods. Those that this version of torch lacks are skipped."""
        for wrap, names in ((self.wrap_wait, _WAITS), (self.wrap_look, _LOOKS), (self.wrap_set, _SETS)):
            for name in names:
                if hasattr(dist.Store, name):  # torch 2.6 has no queues
                    wrap(dist.Store, name)
        for name, kind in itertools.product(_WAITS_OF_A_CLASS, _STORES):
            if hasattr(getattr(dist, kind, None), name):  # nor a barrier
                self.wrap_wait(getattr(dist, kind), name)

    def wrap_wait(self, kind: Any, name: str) -> None:
        """Wrap a method of a class of stores that waits for keys, with its time limit or the store's."""
        original = getattr(kind, name)

        def wait_for_a_key(store: Any, *args: Any, **kwargs: Any) -> Any:  # the name is evidence: it is in the stack
            __tracebackhide__ = True
            if threading.current_thread() is not threading.main_thread():
                return original(store, *args, **kwargs)
            limit = limit_of_call((*args, *kwargs.values())) or limit_of_group(store.timeout)
            until, key = self._limit.until, self._key
            self._set_key(keys_of_call(args, kwargs))
            self._begins("wait", self._key)
            if limit:
                self._limit.set(wall_clock() + limit)
            try:
                return original(store, *args, **kwargs)
            finally:
                self._set_key(key)
                if limit:
                    self._limit.set(until)

        setattr(kind, name, wait_for_a_key)

    def wrap_look(self, kind: Any, name: str) -> None:
        """Wrap a method of a class of stores that returns at once: a program that calls it in a loop polls for another rank."""
        original = getattr(kind, name)

        def recorded(store: Any, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            if threading.current_thread() is threading.main_thread():
                now = wall_clock()
                if now - self._looked > LOOKS_AGAIN_S:
                    self._board.number("polled_from", now)
                self._set_key(keys_of_call(args, kwargs))
                if name == "add" and any(args[1:]):
                    self._set(self._key, _way())
                self._looked = now
                self._board.number("polled_time", now)
            return original(store, *args, **kwargs)

        setattr(kind, name, recorded)

    def wrap_set(self, kind: Any, name: str) -> None:
        """Wrap a method of a class of stores that sets a key, to record the line at which a rank sets such keys."""
        original = getattr(kind, name)

        def recorded(store: Any, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            self._set(keys_of_call(args, kwargs), _way())
            return original(store, *args, **kwargs)

        setattr(kind, name, recorded)

    def record_latest(self) -> None:
        """Record the last key of each line, at the end of the test."""
        for key, site in self.keys_set.rows():
            self.on_set(key, site)

    def _set(self, key: str, site: str) -> None:
        if self.keys_set.add(key, site):
            self.on_set(key, site)
        self._begins("set", key)

    def _begins(self, kind: str, key: str) -> None:
        if self.on_call is not None:
            self.on_call({"kind": kind, "op": "store", "key": key})

    def _set_key(self, key: str) -> None:
        if key != self._key:
            self._key = key
            self._board.text("key", key)


def _way() -> str:
    """Return the user's lines that led to a call of a store, innermost first: 'train.py:30 in step < main.py:12 in main'."""
    return " < ".join(filter(None, call_path(2)))
