"""Group, payload, root, reduction and splits of a process group's call, read from its arguments."""

import functools
import os
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

_KEYS = 8  # of a call of a store that are kept
_OURS = "pytest_nsa."  # the package of the store that all ranks of a test share


def group_of(value: Any) -> Any:
    """Return the process group that an argument of a functional collective names; None if it names none."""
    if isinstance(value, dist.ProcessGroup):
        return value
    try:
        if isinstance(value, str):
            return dist.distributed_c10d._resolve_process_group(value)
        if isinstance(value, tuple) and len(value) == 2 and hasattr(value[0], "get_group"):
            return value[0].get_group(value[1])
        return value.get_group() if hasattr(value, "get_group") else None
    except (RuntimeError, ValueError):  # a mesh of several dimensions; a text that names no group
        return None


class NewGroup(NamedTuple):
    """A process group that torch is about to make: its size, this rank's number in it, its ranks by the world's numbers, its name,
    and its store in words and in short. ``ranks`` is empty for a default group, and for another group with its own numbers.
    """

    size: int
    rank: int | None  # None, or negative, if this rank is no member
    ranks: tuple[int, ...]
    name: str
    place: str
    mark: str

    @property
    def note(self) -> str:
        """Name and ranks of the group (`in_runs`), '2: 0,1'; without ``ranks``, its name, this rank's claim and the store:
        '0: rank 1 of 4, by port 29500 of localhost'.
        """
        if self.ranks:
            return f"{self.name}: {in_runs(self.ranks)}"
        return f"{self.name}: {numbered(self.rank, self.size)}{f', by {self.place}' if self.place else ''}"


_OF_HELPER = ("group_size", "group_rank", "global_ranks_in_group", "backend", "store", "group_name")


def new_group(args: tuple[Any, ...], kwargs: dict[str, Any]) -> NewGroup | None:
    """Return the group by the arguments of torch's ``_new_process_group_helper``; None for those of another version of torch."""
    given = dict(zip(_OF_HELPER, args, strict=False)) | kwargs
    if not given.keys() >= set(_OF_HELPER) or not isinstance(given["global_ranks_in_group"], list):
        return None
    size, rank, ranks, _, store, name = (given[of] for of in _OF_HELPER)
    return NewGroup(size, rank, tuple(ranks), str(name), store_place(store), store_mark(store))


def in_runs(ranks: Sequence[int]) -> str:
    """Return ranks, in their order, in a short form: '0-3,8,10', or '0-14:2' for every second rank."""
    found, at = [], 0
    while at < len(ranks):
        step = ranks[at + 1] - ranks[at] if at + 1 < len(ranks) else 0
        end = at + 1
        while step > 0 and end < len(ranks) and ranks[end] - ranks[end - 1] == step:
            end += 1
        if end - at > 2:
            found.append(f"{ranks[at]}-{ranks[end - 1]}" + (f":{step}" if step > 1 else ""))
        else:
            end = at + 1
            found.append(str(ranks[at]))
        at = end
    return ",".join(found)


def numbered(rank: int | None, world_size: int) -> str:
    """Return 'rank 1 of 4': a rank's claim when a default group is made."""
    return f"rank {rank} of {world_size}"


def store_place(store: Any) -> str:
    """Return where ranks meet: a file's name, or host and port; '' if unknown."""
    store = underlying(store)
    if isinstance(store, dist.FileStore):
        return f"file ...{store.path[-48:]}"
    return f"port {store.port} of {store.host}" if isinstance(store, dist.TCPStore) else ""


def store_mark(store: Any) -> str:
    """Return where ranks meet in 11 characters; '' for a store in the memory of one process."""
    store = underlying(store)
    if isinstance(store, dist.TCPStore):
        return str(store.port)
    if isinstance(store, dist.FileStore):
        path = os.path.abspath(store.path)
        return f"{os.path.basename(path)[-6:]}-{zlib.crc32(path.encode()) & 0xFFFF:04x}"
    return "job" if type(store).__module__.startswith(_OURS) else ""


def underlying(store: Any) -> Any:
    """Return the store below those that prefix its keys."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def keys_of_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return the first `_KEYS` keys of a store's call, as the caller names them; '' if it names none."""
    named = args[0] if args else kwargs.get("key", kwargs.get("keys", ""))
    keys = named if isinstance(named, list | tuple) else [named]
    names = [key.decode(errors="replace") if isinstance(key, bytes) else str(key) for key in keys[:_KEYS] if key]
    return ", ".join([*names, "…"] if len(keys) > _KEYS else names)


def split_sizes(args: tuple[Any, ...], size: int) -> str:
    """Return how many rows go to and come from each rank of a group of ``size``, 'gives 1,2 takes 2,1'; '' if both are even."""
    takes, gives = ([a for a in args if isinstance(a, list) and all(isinstance(n, int) for n in a)] + [[], []])[:2]
    if not takes and not gives:
        return ""
    if all(isinstance(a, torch.Tensor) for a in args[:2]):  # the output, and the input
        rows = [a.shape[0] if a.dim() else 0 for a in args[:2]]
        takes, gives = takes or [rows[0] // size] * size, gives or [rows[1] // size] * size
    return f"gives {','.join(map(str, gives))} takes {','.join(map(str, takes))}" if gives and takes else ""


def was_refused(error: Exception, name: str) -> bool:
    """Return whether a call of a process group raised before it began, because of an invalid argument, and not while it
    communicated.
    """
    if isinstance(error, ValueError | TypeError | NotImplementedError):
        return True
    # 'ProcessGroupGloo::scatter: Incorrect input list size 2.'; '[rank0]:[F... ProcessGroupGloo.cpp:1537] Check failed: ...'
    text = str(error)
    is_check = "ProcessGroup" in text[:200] and "Check failed" in text[:200]
    return (text.startswith("ProcessGroup") or is_check) and name != "monitored_barrier"


def label_of(group: Any) -> str:
    """Return the name of a group; '' for a group that was never registered."""
    try:
        return str(group.group_name)
    except RuntimeError:  # a backend that is written in Python has no name in C++
        return str(dist.distributed_c10d._world.pg_names.get(group, ""))


def global_rank(group: Any, rank: int) -> int:
    """Return the global number of a rank that a group numbers; ``rank`` itself for a group that was never registered."""
    try:
        return dist.get_global_rank(group, rank)
    except (RuntimeError, ValueError, KeyError):  # a group that was never registered
        return rank


@functools.cache
def asynchronous_sum() -> dist.AllreduceOptions:
    """Return the options of a sum that runs while a backward does, always the same object."""
    options = dist.AllreduceOptions()
    if hasattr(options, "asyncOp"):  # since torch 2.8
        options.asyncOp = True
    return options


def root_and_reduction(values: Any) -> tuple[int, str]:
    """Return root (-1 without one) and reduction ('' without one) of a call, from its options."""
    options = None
    for value in values:
        if type(value).__name__.endswith("Options"):
            if value is asynchronous_sum():  # a third of the cost of recording a reduction is the name of its operation
                return -1, "sum"
            options = value
            break
    try:  # the only way to its name that works in all versions of torch
        kind = options.reduceOp.__getstate__()[0].name.lower()  # type: ignore[union-attr]
    except (AttributeError, TypeError, IndexError, RuntimeError):
        kind = ""
    return getattr(options, "rootRank", -1), kind


def is_done_after_wait(group: Any, device: str) -> bool:
    """Return whether ``wait`` of a collective on ``device`` returns only when it is done, as gloo's does.

    ``is_completed`` cannot be used: gloo's reduce_scatter returns False for ever (torch 2.6 to 2.13).
    """
    try:
        name: str = group._get_backend(torch.device(device or "cpu")).name()
    except (RuntimeError, AttributeError, TypeError):  # a backend that is written in Python has none in C++
        return False
    return name == "gloo"


def payload_of(values: Any) -> tuple[str, int, str]:
    """Return dtype, total element count and device type of the first tensors among a call's arguments."""
    for value in values:
        flat = value
        while isinstance(flat, list | tuple) and flat and isinstance(flat[0], list | tuple):
            flat = flat[0]
        tensors = flat if isinstance(flat, list | tuple) else (flat,)
        if tensors and isinstance(first := tensors[0], torch.Tensor):
            count = first.numel() if len(tensors) == 1 else sum(t.numel() for t in tensors)
            return _name_dtype(first.dtype), count, first.device.type
    return "", 0, ""


@functools.cache
def _name_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
