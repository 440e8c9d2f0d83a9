"""Compare the ranks' sequences of collectives: where they differ, and whether a call that a rank waits in can complete."""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from pytest_nsa.evidence.board import Collective, get_world

_RUN = re.compile(r"(?P<first>\d{1,9})(-(?P<last>\d{1,9})(:(?P<step>\d{1,9}))?)?")
Rings = Mapping[int, tuple[Collective, ...]]
Members = Callable[[str], Sequence[int]]  # the ranks of a group, by its name


@functools.lru_cache(maxsize=256)
def parse_ranks(text: str, world_size: int) -> tuple[int, ...]:
    """Return the ranks below ``world_size`` of a group from their recorded form: '0-3,8', or '0-14:2' for every second rank; each
    once, in their order. () for any other text, and for one that was cut off ('0,2,7…').
    """
    found: dict[int, None] = {}
    for part in text.split(",", world_size)[:world_size]:  # in a folder of unknown origin, a text may have any length
        run = _RUN.fullmatch(part)
        if run is None:
            return ()
        first, last, step = int(run["first"]), int(run["last"] or run["first"]), int(run["step"] or 1)
        found |= dict.fromkeys(range(first, min(last + 1, world_size), max(step, 1)))
    return tuple(found)


def first_departure(rings: Rings) -> dict[int, Collective] | None:
    """Return each rank's call at the first sequence number of a group where the calls differ; None if no calls differ.

    Compared are operation and, for operations that demand it, dtype and element count. Point-to-point calls pair by tag
    and are excluded; so are calls that only one rank's ring still holds.
    """
    differing = (calls for calls in in_sequence(rings) if len({c.shape for c in calls.values()}) > 1)
    return next(differing, None)


def in_sequence(rings: Rings) -> Iterator[dict[int, Collective]]:
    """Yield each rank's call at each place, by sequence number; without sends and receives."""
    found = by_place({rank: [c for c in ring if c.peer == -1] for rank, ring in sorted(rings.items())})
    for place in sorted(found, key=lambda place: (place[1], place[0])):
        yield found[place]


def by_place(rings: Mapping[int, Iterable[Collective]]) -> dict[tuple[str, int], dict[int, Collective]]:
    """Return each rank's call, by group and sequence number."""
    found: dict[tuple[str, int], dict[int, Collective]] = {}
    for rank, ring in rings.items():
        for c in ring:
            found.setdefault(c.place, {})[rank] = c
    return found


def any_can_complete(calls: Iterable[Collective], rings: Rings) -> bool:
    """Return whether one of the calls can complete: every rank of its group has entered it, or not all ranks of its group are
    known, as those of another job's group.
    """
    entered = Counter(itertools.chain.from_iterable({c.place for c in ring} for ring in rings.values()))
    return any(entered[c.place] >= c.size or has_unknown_ranks(c, rings) for c in calls)


def has_unknown_ranks(call: Collective, rings: Rings) -> bool:
    """Return whether the group of a call is of another world, and some of its ranks have made no call here."""
    came = (any(c.group == call.group for c in ring) for ring in rings.values())
    return bool(get_world(call.group)) and sum(came) < call.size


def deadlocked(waits: Mapping[int, Collective], rings: Rings, members: Members) -> dict[int, Collective]:
    """Return the calls that cannot complete, whatever the other ranks do: each needs a rank that waits in another of these calls.
    {} if any call is a send or receive.
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


def find_awaited_ranks(waits: Mapping[int, Collective], rings: Rings, members: Members) -> set[int]:
    """Return the ranks that wait for each other: each is missing in the call of another rank of the result."""
    stuck = dict(waits)
    while True:
        lacked = set().union(*lacking(stuck.values(), stuck, rings, members).values())
        if lacked >= stuck.keys():
            return set(stuck)
        stuck = {rank: c for rank, c in stuck.items() if rank in lacked}


def lacking(
    calls: Iterable[Collective], ranks: Collection[int], rings: Rings, members: Members
) -> dict[tuple[str, int], set[int]]:
    """Return, by the place of each call, which of ``ranks`` belong to its group and have not entered it."""
    by_place = {c.place: c for c in calls}
    entered = {rank: by_place.keys() & {c.place for c in rings.get(rank, ())} for rank in ranks}
    # The calls that DDP makes by itself are counted separately, but are in the same group.
    return {
        place: {m for m in members(c.process_group) if m in entered and place not in entered[m]}
        for place, c in by_place.items()
    }


def waits_in_different_calls(blocked: Mapping[int, Collective | None], rings: Rings) -> dict[int, Collective] | None:
    """Return the call that each rank waits in, if all ranks wait, at different places, and no call can complete; else None.

    None also if any rank does not wait, or waits for a send or receive.
    """
    found = {rank: c for rank, c in blocked.items() if c is not None and c.peer == -1}
    if len(found) < max(2, len(blocked)) or len({c.place for c in found.values()}) < 2:
        return None
    return None if any_can_complete(found.values(), rings) else found
