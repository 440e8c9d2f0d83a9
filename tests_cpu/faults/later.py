"""A process group whose calls return at once and complete later, as NCCL's do: over gloo, in a thread of its own.

``wait()`` of its works returns at once too: what blocks is `synchronize`, as ``torch.cuda.synchronize`` or ``.item()`` does.
"""

from __future__ import annotations

import _thread
import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_pending: list[LaterWork] = []


class LaterWork(dist._Work):
    """Work that completes when its call over gloo has."""

    def __init__(self) -> None:
        super().__init__()
        self.completed = threading.Event()
        self.released = _thread.allocate_lock()
        self.released.acquire()

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        """Return at once: only the device waits."""
        return True

    def is_completed(self) -> bool:
        """Return whether the device has completed it."""
        return self.completed.is_set()

    def get_future(self) -> Any:
        """Raise RuntimeError: it has no future."""
        raise RuntimeError("no future")


class LaterGroup(dist.ProcessGroup):
    """Gloo's collectives in the order in which they were called, one at a time."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], LaterWork]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="device", daemon=True).start()

    def _run(self) -> None:
        while True:
            call, work = self._calls.get()
            call().wait()
            work.completed.set()
            work.released.release()

    def _later(self, call: Callable[[], Any]) -> LaterWork:
        work = LaterWork()
        _pending.append(work)
        self._calls.put((call, work))
        return work

    def getBackendName(self) -> str:
        """Return the name, which torch requires."""
        return "later"

    def allreduce(self, tensors: Any, opts: Any = None) -> LaterWork:
        """Queue the call."""
        return self._later(lambda: self._gloo.allreduce(tensors, opts))

    def broadcast(self, tensors: Any, opts: Any = None) -> LaterWork:
        """Queue the call."""
        return self._later(lambda: self._gloo.broadcast(tensors, opts))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> LaterWork:
        """Queue the call."""
        return self._later(lambda: self._gloo.allgather(outputs, inputs, opts))


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> LaterGroup:
    return LaterGroup(store, rank, size, timeout)


def later_group() -> Any:
    """Return a new group of all ranks, on such a backend."""
    if not hasattr(dist.Backend, "LATER"):
        dist.Backend.register_backend("later", _create, devices=["cpu"])
    return dist.new_group(backend="later")


def synchronize() -> None:
    """Block, in one native call per work, until everything queued has completed."""
    while _pending:
        _pending.pop(0).released.acquire()
