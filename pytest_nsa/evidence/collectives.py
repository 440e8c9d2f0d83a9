"""Compares the ranks' sequences of collectives: where they differ, whether what a rank waits in can complete, who is in a group."""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from pytest_nsa.evidence.board import Collective, world_of

_RUN = re.compile(r"(?P<first>\d{1,9})(-(?P<last>\d{1,9})(:(?P<step>\d{1,9}))?)?")
Rings = Mapping[int, tuple[Collective, ...]]
Members = Callable[[str], Sequence[int]]  # the ranks of a group, by its name


@functools.lru_cache(maxsize=256)
def ranks_of(text: str, world_size: int) -> tuple[int, ...]:
    """Return the ranks below ``world_size`` of a group as they record it: '0-3,8', or '0-14:2' for every other; each once, in their
    order. () of any other text, and of one that was cut off ('0,2,7…').
    """
    found: dict[int, None] = {}
    for part in text.split(",", world_size)[:world_size]:  # a stranger's text may be of any length
        run = _RUN.fullmatch(part)
        if run is None:
            return ()
        first, last, step = int(run["first"]), int(run["last"] or run["first"]), int(run["step"] or 1)
        found |= dict.fromkeys(range(first, min(last + 1, world_size), max(step, 1)))
    return tuple(found)


def first_departure(rings: Rings) -> dict[int, Collective] | None:
    """Return what each rank entered at the first sequence number of a group where their calls differ; None where none does.

    Compared are operation and, for operations that demand it, dtype and element count. Point-to-point calls pair by tag
    and are excluded; so is what only one rank's ring still holds.
    """
    found = by_place({rank: [c for c in ring if c.peer == -1] for rank, ring in rings.items()})
    for place in sorted(found, key=lambda place: (place[1], place[0])):
        if len({c.shape for c in found[place].values()}) > 1:
            return dict(sorted(found[place].items()))
    return None


def by_place(rings: Mapping[int, Iterable[Collective]]) -> dict[tuple[str, int], dict[int, Collective]]:
    """Return what each rank entered, by group and sequence number."""
    found: dict[tuple[str, int], dict[int, Collective]] = {}
    for rank, ring in rings.items():
        for c in ring:
            found.setdefault(c.place, {})[rank] = c
    return found


def any_can_complete(calls: Iterable[Collective], rings: Rings) -> bool:
    """Return whether every rank of its group has entered one of the calls: then it ends by itself, however long it takes. So may
    one in a group of which not all ranks are known, as of another job's.
    """
    entered = Counter(itertools.chain.from_iterable({c.place for c in ring} for ring in rings.values()))
    return any(entered[c.place] >= c.size or has_unknown_ranks(c, rings) for c in calls)


def has_unknown_ranks(call: Collective, rings: Rings) -> bool:
    """Return whether the group of a call is of another world, of which fewer ranks have made calls than it has."""
    came = (any(c.group == call.group for c in ring) for ring in rings.values())
    return bool(world_of(call.group)) and sum(came) < call.size


def deadlocked(waits: Mapping[int, Collective], rings: Rings, members: Members) -> dict[int, Collective]:
    """Return those of the ranks' calls that cannot complete whatever all other ranks do: each lacks a rank that is in another of
    them. {} where any of the calls is a send or receive.
    """
    if any(c.peer != -1 for c in waits.values()):
        return {}
    stuck = dict(waits)
    while True:
        lacks = lacking(stuck.values(), stuck, rings, members)
        held = {rank: c for rank, c in stuck.items() if lacks[c.place]}
        if len(held) == len(stuck):
            return held
        stuck = held


def waited_for(waits: Mapping[int, Collective], rings: Rings, members: Members) -> set[int]:
    """Return the ranks that some other one's call lacks, which is itself waited for: not who waits for them alone."""
    stuck = dict(waits)
    while True:
        lacked = set().union(*lacking(stuck.values(), stuck, rings, members).values())
        if lacked >= stuck.keys():
            return set(stuck)
        stuck = {rank: c for rank, c in stuck.items() if rank in lacked}


def lacking(
    calls: Iterable[Collective], ranks: Collection[int], rings: Rings, members: Members
) -> dict[tuple[str, int], set[int]]:
    """Return by the place of each call which of ``ranks`` are of its group and have not entered it. Many ranks are in one call."""
    by_place = {c.place: c for c in calls}
    entered = {rank: by_place.keys() & {c.place for c in rings.get(rank, ())} for rank in ranks}
    # What DDP does by itself is counted separately, in the same group.
    return {
        place: {m for m in members(c.process_group) if m in entered and place not in entered[m]}
        for place, c in by_place.items()
    }


def waits_in_different_calls(blocked: Mapping[int, Collective | None], rings: Rings) -> dict[int, Collective] | None:
    """Return what each rank waits in, when all wait, not all in the same place, and nothing of it can complete.

    No rank can help another then. None when any rank is free, or waits for a send or receive.
    """
    found = {rank: c for rank, c in blocked.items() if c is not None and c.peer == -1}
    if len(found) < max(2, len(blocked)) or len({c.place for c in found.values()}) < 2:
        return None
    return None if any_can_complete(found.values(), rings) else found
