"""End the ranks of a test that its time limit or an interrupt has ended, once it had time to end them itself; and what keeps a
session from ending.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from pytest_nsa.system.clock import monotonic
from pytest_nsa.system.descendants import TICKS, Key, Process, end

IDLE_S = 10.0  # after which idle processes that keep a session from ending are ended
# The same for a worker of xdist, and the most that it waits: its controller kills it after 10 s.
WORKER_WAITS = 4.0, 7.0
BUSY, MOVES = 0.2, 100_000  # of a core, and bytes a second: a process that uses or moves more is at work
CLEANUP_S = 3.0  # for the test, and for each pool, to end their processes


class ProcessEnds:
    """``look`` returns the processes that are to be ended. ``ended`` has the keys of those that were."""

    def __init__(self, look: Callable[[], Sequence[Process]]) -> None:
        self._look = look
        self.ended: set[Key] = set()
        self._timer: threading.Timer | None = None

    def begin(self, is_over: Callable[[], bool]) -> bool:
        """End the processes after `CLEANUP_S` if ``is_over`` then returns true; return whether there are any."""
        found = self._look()
        if found and (self._timer is None or not self._timer.is_alive()):
            self._timer = threading.Timer(CLEANUP_S, lambda: self.end(found) if is_over() else None)
            self._timer.daemon = True
            self._timer.start()
        return bool(found)

    def finish(self) -> None:
        """End the processes now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
            self._timer = None
        self.end(self._look())

    def end(self, processes: Sequence[Process]) -> None:
        """End processes. A pool of multiprocessing ends its workers itself: an idle one that is killed holds a lock for ever, and
        the pool waits for that lock when it is closed, at exit at the latest.
        """
        self.ended |= {process.key for process in processes}
        pids = {process.pid for process in processes}
        for pool in _pools():
            if not pids.isdisjoint(getattr(worker, "pid", None) for worker in pool._pool):
                ends = threading.Thread(target=pool.terminate, daemon=True)
                ends.start()
                ends.join(CLEANUP_S)
        end(processes)


def of_ranks(processes: Sequence[Process], ranks: Collection[int]) -> list[Process]:
    """Return the processes that are ranks (pids), that have started ranks, or that ranks have started."""
    parents = {process.pid: process.parent for process in processes}

    def line(pid: int) -> Iterator[int]:
        while pid in parents:
            yield pid
            pid = parents[pid]

    above = {pid for rank in ranks for pid in line(rank)}
    return [p for p in processes if p.pid in above or any(pid in ranks for pid in line(p.pid))]


def is_interrupted() -> bool:
    """Return whether the main thread handles a KeyboardInterrupt: a test that has caught one goes on."""
    handled: Any = sys._current_exceptions().get(threading.main_thread().ident or 0)
    error = handled[1] if isinstance(handled, tuple) else handled  # three values before Python 3.12
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def _pools() -> list[Any]:
    """Return the pools of multiprocessing that are open."""
    module, registry = sys.modules.get("multiprocessing.pool"), sys.modules.get("multiprocessing.util")
    if module is None or registry is None:
        return []
    finalizers = list(registry._finalizer_registry.values())
    owners = (finalizer._weakref() for finalizer in finalizers if getattr(finalizer, "_weakref", None) is not None)
    return [owner for owner in owners if isinstance(owner, module.Pool)]


def joined_at_exit() -> set[int]:
    """Return the pids of the processes that multiprocessing joins at exit.

    Executors end those of theirs that have no work, and finalizers those of managers, before that.
    """
    module = sys.modules.get("multiprocessing.process")
    started = module.active_children() if module is not None else ()
    executors = sys.modules.get("concurrent.futures.process")
    idle: set[int] = set()
    for manager in list(getattr(executors, "_threads_wakeups", ())):
        if not getattr(manager, "pending_work_items", True):
            idle.update(getattr(manager, "processes", None) or ())
    finalizers = getattr(sys.modules.get("multiprocessing.util"), "_finalizer_registry", {})
    for (priority, _), finalizer in list(finalizers.items()):
        if priority is not None and priority >= 0:  # called before the join
            arguments = getattr(finalizer, "_args", ())
            idle.update(p.pid for p in arguments if isinstance(p, module.BaseProcess))  # type: ignore[union-attr]
    return {child.pid for child in started if not child.daemon} - idle


def left_at_exit(look: Callable[[], Sequence[Process]], idle: float, limit: float) -> list[Process]:
    """Wait until the processes that multiprocessing joins at exit have done no work, and moved no data, for ``idle`` seconds, or
    for ``limit`` seconds; return these processes, and those above and below them, [] if they have ended.
    """
    began = idle_since = monotonic()
    before = {p.key: (p.cpu, p.moved) for p in look()}
    while True:
        for _ in range(10):
            time.sleep(0.1)
            joined = joined_at_exit()
            if not joined:
                return []
        found = look()
        now, seen = monotonic(), {p.key: (p.cpu, p.moved) for p in found}
        used = [[x - y for x, y in zip(seen[key], before.get(key, (0, 0)), strict=True)] for key in seen]
        if any(cpu > BUSY * TICKS or moved > MOVES for cpu, moved in used):
            idle_since = now
        before = seen
        if now - idle_since >= idle or now - began >= limit:
            return [p for p in of_ranks(found, joined) if not p.has_ended]
