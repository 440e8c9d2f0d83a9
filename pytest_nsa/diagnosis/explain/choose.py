"""Which edit of one side's calls explains that two sides of the ranks are in different calls, where nothing but the program tells.

Two questions decide. Which side is ahead in the program? Is the call of the side behind part of the program that both run? The side
ahead has left out what the common program has; a call that the program leaves to the side behind alone is one more.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pytest_nsa.diagnosis.explain.conditions import Path, path_to
from pytest_nsa.diagnosis.explain.program import (
    Compared,
    Order,
    Position,
    compare,
    is_called_back,
    is_in_first_round,
    position_of,
)
from pytest_nsa.diagnosis.rules.visits import counts_of_rounds
from pytest_nsa.evidence.board import NEW_GROUP, Collective
from pytest_nsa.evidence.source import file_name
from pytest_nsa.evidence.values import Evidence


class Edit(enum.Enum):
    """What one side did to the calls that all make."""

    SKIP = "skipped_collective"
    EXTRA = "extra_collective"


@dataclass(frozen=True, slots=True)
class Explanation:
    """An edit, the ranks that made it, and the call that they left out or made.

    ``terms`` are what it rests on, in words; ``is_known``: more than the order of the lines; ``is_assumed``: it is not known
    whether the side ahead has come round a loop, or goes on in it.
    """

    edit: Edit
    ranks: tuple[int, ...]
    call: Collective
    terms: tuple[str, ...]
    is_known: bool
    is_assumed: bool = False


Sides = tuple[tuple[int, ...], tuple[int, ...]]


def sides_of(entered: Mapping[int, Collective]) -> Sides | None:
    """Return the ranks of two sides that are in two different calls, as many in each; None for any other picture."""
    sides: dict[object, list[int]] = {}
    for rank, call in sorted(entered.items()):
        sides.setdefault((call.place, call.shape), []).append(rank)
    found = [tuple(side) for side in sides.values()]
    return (found[0], found[1]) if len(found) == 2 and len(found[0]) == len(found[1]) else None


def explain_sides(evidence: Evidence, sides: Sides, entered: Mapping[int, Collective]) -> Explanation | None:
    """Return the edit that explains two sides in different calls of one group; None where it is not known who is ahead."""
    one, other = (side[0] for side in sides)
    positions = {r: position_of(evidence.ranks[r], entered[r]) for r in (one, other)}
    latest = _latest_common(evidence, one, other, entered)
    go_on = (_goes_on(evidence, one, other, entered), _goes_on(evidence, other, one, entered))
    steps = (entered[one].step, entered[other].step)
    compared = compare(evidence.sources, positions[one], positions[other], latest, go_on, steps)
    if compared.left or compared.order not in (Order.BEFORE, Order.AFTER):
        return None
    if any(is_called_back(evidence.ranks[r], at.place) for r, at in zip((one, other), compared.parted, strict=True)):
        return None
    ahead, behind = sides if compared.order is Order.AFTER else sides[::-1]
    call = entered[behind[0]]
    made = (c for r in (one, other) for c in calls_before(evidence, r, entered[r]))
    has_met = any((c.op, c.way) == (call.op, call.way) for c in made)
    path = path_to(evidence.sources, _below(positions[behind[0]], compared), behind, evidence.job.world_size)
    where = f"{_ranks(ahead)} ahead in the program, {_ranks(behind)} behind"
    if compared.is_assumed:
        where += ", if its loop has begun again"
    if has_met:
        found = Explanation(Edit.SKIP, ahead, call, (where, "a round before had the call"), is_known=True)
    elif path is Path.SELECTS:
        alone = f"a condition leaves the call to {_ranks(behind)} alone"
        found = Explanation(Edit.EXTRA, behind, call, (where, alone), is_known=True)
    elif path in (Path.DATA, Path.NOT_DATA):
        found = _under_a_condition(evidence, sides, entered, compared, path, where)
    else:
        found = Explanation(Edit.SKIP, ahead, call, (where, path.value), is_known=True)
    is_known = found.is_known and not compared.is_assumed and not compared.is_likely
    return replace(found, is_known=is_known, is_assumed=compared.is_assumed)


def _under_a_condition(
    evidence: Evidence, sides: Sides, entered: Mapping[int, Collective], compared: Compared, path: Path, where: str
) -> Explanation:
    """Return the edit for a call under a condition that is not on the rank, and that no rank has made before: one more where rounds
    went without it; of a first round it is not known.
    """
    ahead, behind = sides if compared.order is Order.AFTER else sides[::-1]
    frame = compared.parted[0 if behind is sides[0] else 1]
    call, is_first = entered[behind[0]], is_in_first_round(evidence.sources, frame)
    words = {
        True: "in a first round",
        False: "rounds before went without the call",
        None: "of rounds that nothing counts",
    }
    term = words[is_first]
    if is_first is not False and path is Path.NOT_DATA:
        return Explanation(Edit.SKIP, ahead, call, (where, path.value, term), is_known=False)
    return Explanation(Edit.EXTRA, behind, call, (where, path.value, term), is_known=is_first is False)


def calls_before(evidence: Evidence, rank: int, at: Collective) -> list[Collective]:
    """Return what a rank entered before ``at``, of all groups."""
    return [c for c in evidence.ranks[rank].collectives if c.index < at.index and c.op != NEW_GROUP]


def _goes_on(evidence: Evidence, rank: int, other: int, entered: Mapping[int, Collective]) -> bool:
    """Return whether a rank had made fewer calls like its own, since the latest of the other side's, than in each round before: its
    visit to their line has not come to its usual end.
    """
    now, *earlier = counts_of_rounds(calls_before(evidence, rank, entered[rank]), entered[other], entered[rank])
    return len(set(earlier)) == 1 and now < earlier[0]


def _latest_common(evidence: Evidence, one: int, other: int, entered: Mapping[int, Collective]) -> Collective | None:
    """Return the last call before those in ``entered`` that both ranks have made, from the same lines, or one by a wrapper."""
    theirs = {c.place: c for c in calls_before(evidence, other, entered[other]) if c.peer == -1}
    mine = (c for c in reversed(calls_before(evidence, one, entered[one])) if c.peer == -1)
    return next((c for c in mine if c.place in theirs and _are_one(c.way, theirs[c.place].way)), None)


def _are_one(way: tuple[str, ...], other: tuple[str, ...]) -> bool:
    depth = min(len(way), len(other))  # of a caller's file the name alone is known
    return [*map(file_name, way[-depth:])] == [*map(file_name, other[-depth:])]


def _below(position: Position, compared: Compared) -> Position:
    """Return the frames of a position from the function on in which the ranks part."""
    at = next((i for i, frame in enumerate(position) if frame in compared.parted), 0)
    return position[at:]


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
