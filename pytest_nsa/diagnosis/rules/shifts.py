"""Calls that are off by one: the first calls that ranks made from different lines, before they met in different calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pytest_nsa.diagnosis.explain.branches import are_alternatives
from pytest_nsa.diagnosis.explain.locations import where_ways_part
from pytest_nsa.diagnosis.explain.rhythm import expected_next
from pytest_nsa.evidence.board import NEW_GROUP, Collective
from pytest_nsa.evidence.collectives import by_place
from pytest_nsa.evidence.values import Evidence


@dataclass(frozen=True, slots=True)
class Shift:
    """A call ``extra`` that some ranks made from another line, paired with the others' ``usual`` call."""

    ranks: tuple[int, ...]
    extra: Collective
    usual: Collective


def first_shift(evidence: Evidence) -> Shift | None:
    """Return the first call that ranks made from a line without an earlier call in that group, paired with the others'
    usual call.

    The two are so similar that neither side waits: from then on the ranks are off by one call. None where another
    departure came first, or where the ranks' lines differ by the program's design.
    """
    rings = {r.rank: _calls(evidence, r.rank) for r in evidence.ranks}
    for entered in sorted(by_place(rings).values(), key=lambda calls: min(c.entered for c in calls.values())):
        if len({c.shape for c in entered.values()}) > 1:
            return None
        ways = {c.way for c in entered.values()}
        if len(entered) < 2 or len(ways) < 2:
            continue
        before = {
            rank: {c.way for c in rings[rank] if c.group == call.group and c.sequence < call.sequence}
            for rank, call in entered.items()
        }
        new = tuple(rank for rank, call in sorted(entered.items()) if call.way not in before[rank])
        others = [rank for rank in entered if rank not in new]
        if not new or not others or len(new) > len(others):
            return None
        usual = entered[others[0]]
        if are_alternatives(evidence.sources, *where_ways_part(entered[new[0]].way, usual.way)):
            continue  # one call in the two branches of an `if`
        # It returned to its usual calls: an extra call, where a rank at a line of the shift has left them.
        returned = {r: any(c.index > entered[r].index and c.way in before[r] for c in rings[r]) for r in new}
        if all(usual.way in before[rank] and returned[rank] for rank in new):
            return Shift(new, entered[new[0]], usual)
        return None
    return None


def first_at_different_lines(
    evidence: Evidence, culprits: tuple[int, ...], missed: Collective
) -> tuple[Collective, Collective] | None:
    """Return the first calls of ``missed``'s group that the culprits and the others made from different lines, before
    ``missed``, the culprits' first.

    The skipped call resembles the next one, so that neither side waited. None where lines differ by the program's
    design: they became equal again, and not because one sequence lags behind the other.
    """
    rings = {r: [c for c in _calls(evidence, r) if c.group == missed.group] for r in evidence.members(missed.group)}
    whole = [
        found for place, found in sorted(by_place(rings).items()) if place < missed.place and len(found) == len(rings)
    ]
    odd = frozenset(culprits)
    sides = [
        ({c.way for r, c in found.items() if r in odd}, {c.way for r, c in found.items() if r not in odd})
        for found in whole
    ]
    first = next((i for i, (mine, theirs) in enumerate(sides) if mine != theirs), None)
    if not first or any(len(mine) != 1 or len(theirs) != 1 for mine, theirs in sides):
        return None  # no earlier call shows that the lines are usually equal
    ours, others = ([way for side in sides[first:] for way in side[i]] for i in (0, 1))
    if len(set(ours)) == 1 < len(set(others)):
        return None  # one line answers all of the others' calls, as DDP's join does
    lags = any(ours[: len(ours) - k] == others[k:] for k in range(1, len(ours)))
    if not lags and any(a == b for a, b in zip(ours, others, strict=True)):
        return None
    mine = next(c for r, c in whole[first].items() if r in odd)
    theirs = next(c for r, c in whole[first].items() if r not in odd)
    return theirs, mine


def parted_before(
    evidence: Evidence, entered: Mapping[int, Collective]
) -> tuple[tuple[int, ...], Collective, Collective] | None:
    """Return the ranks that skipped a call before the one at which two sides' calls ``entered`` differ (or at it, where
    only the payloads differ); that call as the others made it; and what the culprits made in its place.

    All ranks made the skipped call there in earlier rounds, and the others' calls followed from it, line by line, up to
    the difference.
    """
    one = next(iter(entered.values()))
    if len({c.shape for c in entered.values()}) == 2:
        odd, latest = frozenset(r for r, c in entered.items() if c.shape == one.shape), one.sequence - 1
    elif len({c.way for c in entered.values()}) == 2:
        # Equal except for the payload: they may have diverged just there.
        odd, latest = frozenset(r for r, c in entered.items() if c.way == one.way), one.sequence
    else:
        return None
    group = one.group
    rings = {r: [c for c in _calls(evidence, r) if c.group == group and c.sequence <= one.sequence] for r in entered}
    places = by_place(rings)

    def sides(sequence: int) -> tuple[set[tuple[str, ...]], set[tuple[str, ...]]]:
        calls = places.get((group, sequence), {})
        return {c.way for r, c in calls.items() if r in odd}, {c.way for r, c in calls.items() if r not in odd}

    first = latest + 1
    while all(len(ways) == 1 for ways in sides(first - 1)) and len(set.union(*sides(first - 1))) == 2:
        first -= 1
    before = [c for c in rings[min(entered)] if c.sequence < first]
    if first > latest or not before or any(len(set.union(*sides(c.sequence))) != 1 for c in before):
        return None
    expected = expected_next([(c.way,) for c in before])
    calls = places[group, first]
    usual = [r for r, c in calls.items() if (c.way,) == expected]
    others = tuple(sorted(r for r in calls if r not in usual))
    if not usual or not others:
        return None
    missed, made = calls[usual[0]], calls[others[0]]
    # The call in its place follows it in other rounds. Where they make it later, they made an extra call.
    is_late = any(c.way == missed.way for c in rings[others[0]] if c.sequence > first)
    if is_late or all(c.way != made.way for c in before):
        return None
    return others, missed, made


def _calls(evidence: Evidence, rank: int) -> list[Collective]:
    return [c for c in evidence.ranks[rank].collectives if c.peer == -1 and c.op != NEW_GROUP]
