"""The labels of process groups on the board: a group's name, and the world that numbers its ranks.

torch gives the default group, and the groups made from it, the same names in every world. A job may have several worlds (pairs that
train and serve, the rest of an elastic job, a group with its own store and numbers): then different groups have the same name. The
label of such a group also has the place where its ranks meet: '0@29512', '0@pair-3fa9'.
"""

import zlib
from typing import Any, NamedTuple

import torch.distributed as dist

from nsa.trace.calls.arguments import NewGroup, label_of

MARK = "@"
MOST = 20  # characters of a label: with 'ddp:' in front it must fit into a field of 24


class Made(NamedTuple):
    """A group that is made: the labels of its creation and of its calls, the ranks of the job that are known to be in it, and this
    rank's number in it, if its world is not the job's.
    """

    making: str
    label: str
    ranks: tuple[int, ...]
    number: int | None = None


class GroupLabels:
    """The labels of this process's groups. ``rank`` and ``world_size`` are the job's.

    A process may make its default group before the job is known, as ranks that are forked ahead do, and may keep groups for the
    next job. Therefore the arguments with which groups were made are kept, not their labels.
    """

    def __init__(self) -> None:
        self.rank, self.world_size = 0, 0  # until the job is known
        self._default: NewGroup | None = None
        self._others: dict[str, NewGroup] = {}  # by name

    def begin(self, rank: int, world_size: int) -> None:
        """Reset for another job in this process; reused ranks keep the groups of the last job."""
        self.rank, self.world_size = rank, world_size
        if not dist.is_initialized():
            self._default = None
            self._others.clear()

    def of(self, group: Any) -> str:
        """Return the label of a group. The label of a group without a name equals that of no group of another rank."""
        name = label_of(group)
        return self._label(name) if name else _labelled("unnamed", f"{MARK}rank{self.rank}")

    def of_rendezvous(self, operation: str, port: int, size: int) -> str:
        """Return the label of the rendezvous of ``size`` ranks at a port, before they make their default group."""
        return _labelled(operation, "" if self._is_job_size(size) else f"{MARK}{port}")

    def make(self, operation: str, new: NewGroup) -> Made:
        """Note that a group is about to be made, and return its labels."""
        if not new.ranks and not dist.is_initialized():
            self._default = new
            self._others.clear()
        else:
            self._others[new.name] = new
        return self._made(operation, new)

    def all_made(self, operation: str) -> list[Made]:
        """Return the groups that this process has."""
        return [self._made(operation, new) for new in (self._default, *self._others.values()) if new is not None]

    def _made(self, operation: str, new: NewGroup) -> Made:
        label = self._label(new.name)
        if not new.ranks:
            world = self._world_of(new)
            making = _labelled(operation, world)
            return Made(making, label, (self.rank,), new.rank) if world else Made(making, label, ())
        world = self._world_of(self._default)
        members = new.ranks if not world else (self.rank,) if new.rank in range(new.size) else ()
        # Every rank makes a group with a number as its name; a group with a hash as its name is made only by its members.
        return Made(_labelled(operation if new.name.isdigit() else f"{operation}:{new.name}", world), label, members)

    def _label(self, name: str) -> str:
        other = self._others.get(name)
        return _labelled(name, self._world_of(other if other is not None and not other.ranks else self._default))

    def _is_job_size(self, size: int) -> bool:
        return self.world_size in (0, size)

    def _world_of(self, new: NewGroup | None) -> str:
        """Return '@' and the place where the ranks of a world meet; '' for the job's world."""
        if new is None or self._is_job_size(new.size):
            return ""
        return f"{MARK}{new.mark or f'rank{self.rank}'}"


def _labelled(name: str, world: str) -> str:
    room = MOST - len(world)
    return (name if len(name) <= room else f"{name[: room - 5]}~{zlib.crc32(name.encode()) & 0xFFFF:04x}") + world
