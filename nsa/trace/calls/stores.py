"""Records which keys of a store the main thread waits for, that it looks into one again and again, and where keys are set."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from nsa.trace.board import Board
from nsa.trace.calls.arguments import keys_of_call
from nsa.trace.calls.limits import limit_of_call, limit_of_group
from nsa.trace.frames import call_site

LOOKS_AGAIN_S = 2.0  # between two looks of one loop that polls a store
_WAITS = ("wait", "get", "queue_pop")
# torch takes these of the class of all stores for what a store of Python overrides, and calls them from the original.
_WAITS_OF_A_CLASS = ("multi_get", "barrier")
_LOOKS = ("check", "add", "num_keys")
_SETS = ("set", "append", "compare_set", "multi_set", "queue_push")
_MOST_SITES = 64  # lines that set keys: of each the first and the last one is recorded
_STORES = ("PrefixStore", "TCPStore", "FileStore", "HashStore")


class Limit:
    """Until when the call that the main thread waits in may last, on the board; 0 where it has no limit."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self.until = 0.0

    def set(self, until: float) -> None:
        self.until = until
        self._board.number("limit_time", until)


class StoreRecorder:
    """Wraps the methods of torch's stores in this process for as long as the process lives."""

    def __init__(self, board: Board, limit: Limit) -> None:
        self._board = board
        self._limit = limit
        self._looked = 0.0  # when the main thread last looked into a store
        self._key = ""  # what the main thread waits for, or looked for last
        self._latest: dict[str, str] = {}  # by line, the key that it set last
        self.on_set: Callable[[str, str], None] = _ignore  # the key and the line, once a line

    def forget(self) -> None:
        """Another test begins in this process, on a new board."""
        self._looked, self._key = 0.0, ""
        self._latest.clear()
        self.on_set = _ignore

    def install(self) -> None:
        """Replace the methods. What torch's version does not have is skipped."""
        for name in _WAITS:
            self.wrap_wait(dist.Store, name)
        for name, kind in itertools.product(_WAITS_OF_A_CLASS, _STORES):
            if hasattr(dist, kind):
                self.wrap_wait(getattr(dist, kind), name)
        for name in _LOOKS:
            self.wrap_look(dist.Store, name)
        for name in _SETS:
            self.wrap_set(dist.Store, name)

    def wrap_wait(self, kind: Any, name: str) -> None:
        """Wrap a call of a class of stores that waits for keys: it has a limit, its own or the store's."""
        original = getattr(kind, name, None)
        if original is None:  # torch 2.6 has no queues, nor a barrier
            return

        def wait_for_a_key(store: Any, *args: Any, **kwargs: Any) -> Any:  # the name is evidence: it is in the stack
            __tracebackhide__ = True
            if threading.current_thread() is not threading.main_thread():
                return original(store, *args, **kwargs)
            limit = limit_of_call((*args, *kwargs.values())) or limit_of_group(store.timeout)
            until, key = self._limit.until, self._key
            self._set_key(keys_of_call(args, kwargs))
            if limit:
                self._limit.set(time.time() + limit)
            try:
                return original(store, *args, **kwargs)
            finally:
                self._set_key(key)
                if limit:
                    self._limit.set(until)

        setattr(kind, name, wait_for_a_key)

    def wrap_look(self, kind: Any, name: str) -> None:
        """Wrap a call of a class of stores that returns at once: who makes it in a loop waits for another rank by hand."""
        original = getattr(kind, name)

        def recorded(store: Any, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            if threading.current_thread() is threading.main_thread():
                now = time.time()
                if now - self._looked > LOOKS_AGAIN_S:
                    self._board.number("polled_from", now)
                self._set_key(keys_of_call(args, kwargs))
                self._looked = now
                self._board.number("polled_time", now)
            return original(store, *args, **kwargs)

        setattr(kind, name, recorded)

    def wrap_set(self, kind: Any, name: str) -> None:
        """Wrap a call of a class of stores that sets a key: its line is where a rank sets such keys, and would have set another."""
        original = getattr(kind, name, None)
        if original is None:
            return

        def recorded(store: Any, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            site = call_site()
            if not site or (site not in self._latest and len(self._latest) == _MOST_SITES):
                return original(store, *args, **kwargs)
            key = keys_of_call(args, kwargs)
            if site not in self._latest:
                self.on_set(key, site)
            try:
                return original(store, *args, **kwargs)
            finally:
                self._latest[site] = key

        setattr(kind, name, recorded)

    def latest_keys(self) -> list[tuple[str, str]]:
        """Return (key, line) of the last key that each line set."""
        return [(key, site) for site, key in list(self._latest.items())]

    def _set_key(self, key: str) -> None:
        if key != self._key:
            self._key = key
            self._board.text("key", key)


def _ignore(key: str, site: str) -> None:
    """No call of it is recorded."""
