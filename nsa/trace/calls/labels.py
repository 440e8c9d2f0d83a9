"""What a process group is called on the board: by its name, and by the world that numbers its ranks.

torch gives the default group, and those made below it, the same names in every world. Ranks of a job that do not all meet in one
world (pairs that train and serve, the rest of an elastic job, a group with a store and numbers made for it) are in groups of one
name that are not the same group. Such a name gets the place where the ranks meet: '0@29512', '0@pair-3fa9'.
"""

from __future__ import annotations

import os
import zlib
from typing import Any, NamedTuple

import torch.distributed as dist

from nsa.trace.calls.arguments import NewGroup, label_of, underlying

MARK = "@"
MOST = 20  # characters of a label: 'ddp:' goes before it in a field of 24
_OURS = "pytest_nsa."  # where the store is defined that all ranks of a test share


class Made(NamedTuple):
    """A group that is being made: the labels of its making and of its calls, the ranks of the job that are known to be in it, and
    the number that this one has in another world than the job's.
    """

    making: str
    label: str
    ranks: tuple[int, ...]
    number: int | None = None


class GroupLabels:
    """The labels of this process's groups. ``rank`` and ``world_size`` are the job's."""

    def __init__(self) -> None:
        self.rank, self.world_size = 0, 1
        self._world = ""  # of the default group, and of those made below it
        self._others: dict[str, str] = {}  # by name, of groups that were made with a store for them

    def begin(self, rank: int, world_size: int) -> None:
        """Another job begins in this process: on reused ranks with the groups of the last one."""
        self.rank, self.world_size = rank, world_size
        if not dist.is_initialized():
            self._world = ""
            self._others.clear()

    def of(self, group: Any) -> str:
        """Return the label of a group."""
        name = label_of(group)
        return _labelled(name, self._others.get(name, self._world))

    def of_meeting(self, operation: str, port: int, size: int) -> str:
        """Return the label of the meeting of ``size`` ranks at a port, ahead of their default group."""
        return _labelled(operation, f"{MARK}{port}" if size != self.world_size else "")

    def made(self, operation: str, new: NewGroup) -> Made:
        """Note that a group is made, ahead of it."""
        if new.ranks:
            is_in = new.rank in range(new.size)
            members = tuple(new.ranks) if not self._world else (self.rank,) if is_in else ()
            # Every rank makes a group that torch numbers; one with a hash for a name is made by its members alone.
            making = operation if new.name.isdigit() else f"{operation}:{new.name}"
            return Made(_labelled(making, self._world), _labelled(new.name, self._world), members)
        world = _world_at(new.store, self.rank) if new.size != self.world_size else ""
        if dist.is_initialized():
            self._others[new.name] = world
        else:
            self._world = world
            self._others.clear()
        known = ((self.rank,), new.rank) if world else ((), None)
        return Made(_labelled(operation, world), _labelled(new.name, world), *known)


def _labelled(name: str, world: str) -> str:
    return name[: MOST - len(world)] + world


def _world_at(store: Any, rank: int) -> str:
    """Return '@' and where ranks meet, in 12 characters."""
    store = underlying(store)
    if isinstance(store, dist.TCPStore):
        return f"{MARK}{store.port}"
    if isinstance(store, dist.FileStore):
        path = os.path.abspath(store.path)
        return f"{MARK}{os.path.basename(path)[-6:]}-{zlib.crc32(path.encode()) & 0xFFFF:04x}"
    if type(store).__module__.startswith(_OURS):
        return f"{MARK}job"
    return f"{MARK}rank{rank}"  # a store in the memory of one process
