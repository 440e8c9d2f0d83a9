"""Every collective that Python starts, written to the board as it is entered and left.

The methods of torch's ProcessGroup are wrapped, not the functions of torch.distributed: so names bound early
(``from torch.distributed import all_reduce``) are seen too. DDP's reducer is C++ and calls none of them; its
buckets come through the communication hook of `nsa.trace.ddp_buckets`.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from nsa.trace.board import Board
from nsa.trace.frames import call_site

_METHODS = (
    "allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "_allgather_base",
    "all_gather_single", "allgather_coalesced", "allgather_into_tensor_coalesced", "gather", "scatter",
    "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_tensor_coalesced",
    "alltoall", "alltoall_base", "all_to_all_single", "barrier", "monitored_barrier",
)  # fmt: skip
_POINT_TO_POINT = ("send", "recv", "recv_anysource")


class CollectiveRecorder:
    """Wraps ProcessGroup's methods in this process for as long as the process lives."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self._sequence: defaultdict[str, int] = defaultdict(int)
        self._inside = threading.local()
        self._pending: dict[int, tuple[int, Any]] = {}  # id(work) -> (index on the board, work)
        self._lock = threading.Lock()

    def install(self) -> None:
        """Replace the methods. What torch's version does not have is left out."""
        group_class = dist.ProcessGroup
        for name in (*_METHODS, *_POINT_TO_POINT):
            original = getattr(group_class, name, None)
            if original is not None:
                setattr(group_class, name, self._wrap(name, original))
        # Python subclasses of Work override wait; the C++ ones share this method.
        work_class = torch._C._distributed_c10d.Work
        wait = work_class.wait

        def recorded_wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            result = wait(work, *args, **kwargs)
            self._leave(id(work))
            return result

        work_class.wait = recorded_wait

    def poll(self) -> None:
        """Mark collectives that have completed without anybody waiting for them. Called by the heartbeat."""
        with self._lock:
            waiting = list(self._pending.items())
        for key, (_, work) in waiting:
            if work.is_completed():
                self._leave(key)

    def _leave(self, key: int) -> None:
        with self._lock:
            entry = self._pending.pop(key, None)
        if entry is not None:
            self.board.leave(entry[0])

    def _wrap(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        point_to_point = name in _POINT_TO_POINT

        def recorded(group: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(self._inside, "depth", 0):  # one method may be built on another
                return original(group, *args, **kwargs)
            dtype, count = _payload((*args, *kwargs.values()))
            label = _label(group)
            self._sequence[label] += 0 if point_to_point else 1
            peer = next((a for a in args[1:] if isinstance(a, int)), -1) if point_to_point else -1
            index = self.board.enter(name.strip("_"), label, self._sequence[label], dtype, count, call_site(), peer)
            self._inside.depth = 1
            try:
                work = original(group, *args, **kwargs)
            finally:
                self._inside.depth = 0
            if work is None:
                self.board.leave(index)
            else:
                with self._lock:
                    self._pending[id(work)] = (index, work)
            return work

        return recorded


def _label(group: Any) -> str:
    try:
        return str(group.group_name)
    except RuntimeError:  # a group that was never registered has no name
        return "unnamed"


def _payload(values: Any) -> tuple[str, int]:
    """dtype and total element count of the first tensors among a call's arguments."""
    for value in values:
        flat = value
        while isinstance(flat, list | tuple) and flat and isinstance(flat[0], list | tuple):
            flat = flat[0]
        if isinstance(flat, torch.Tensor):
            return str(flat.dtype).removeprefix("torch."), flat.numel()
        if isinstance(flat, list | tuple) and flat and isinstance(flat[0], torch.Tensor):
            return str(flat[0].dtype).removeprefix("torch."), sum(t.numel() for t in flat)
    return "", 0
