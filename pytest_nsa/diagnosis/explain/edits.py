"""Which edits of the ranks' common program would explain that they are in different calls."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pytest_nsa.diagnosis.explain.contrast import Contrast
from pytest_nsa.diagnosis.explain.rhythm import surprise, token
from pytest_nsa.diagnosis.explain.terms import Sizes, values_of
from pytest_nsa.diagnosis.facts import calls_before, rings
from pytest_nsa.evidence.board import Collective
from pytest_nsa.evidence.collectives import lacking
from pytest_nsa.evidence.values import Evidence

MOST_SIDES = 24  # of different calls that ranks are in
ODD_BITS = 2.0  # by which a rank's call is less expected than others' are

Ranks = tuple[int, ...]
Calls = Mapping[int, Collective]  # what each rank is in


class Edit(enum.Enum):
    """What some ranks did to the program that all run."""

    SKIP = "skipped_collective"
    EXTRA = "extra_collective"
    MISMATCH = "collective_mismatch"
    ORDER = "group_order_deadlock"


@dataclass(frozen=True)
class Candidate:
    """An edit by ``ranks``: they skipped the call of ``others``, made one more, another one, or groups' calls in another order.

    ``is_for_all``: it names all ranks, as it is not known which of them are right.
    """

    edit: Edit
    ranks: Ranks
    others: Ranks
    contrast: Contrast
    values: Mapping[str, float]  # of its terms, by name
    is_for_all: bool = False

    @property
    def kind(self) -> str:
        """The column of the table of weights."""
        return self.edit.name.lower() + (" by all" if self.is_for_all else "")


def candidates(evidence: Evidence, entered: Calls) -> list[Candidate]:
    """Return the edits that would explain ``entered``, in which ranks are in different calls of one place or wait in several."""
    sides = _sides(entered)
    places = {c.place for c in entered.values()}
    pairs = _of_one_place(sides) if len(places) == 1 else _of_waits(evidence, entered, sides)
    found: dict[tuple[Edit, Ranks, Ranks], Candidate] = {}
    contrasts: dict[tuple[int, int], Contrast] = {}
    for edits, ranks, others in pairs:
        if not ranks or not others:
            continue
        one, other = _representative(evidence, ranks), _representative(evidence, others)
        contrast = contrasts.setdefault((one, other), Contrast(evidence, one, entered[one], other, entered[other]))
        contrasts.setdefault((other, one), contrast.turned)
        values = values_of(contrast, Sizes(len(ranks), len(others), len(sides)))
        for edit in edits:
            found.setdefault((edit, ranks, others), Candidate(edit, ranks, others, contrast, values))
    everybody = tuple(sorted(entered))
    if found:
        contrast = next(iter(found.values())).contrast
        sizes = Sizes(len(sides[0]), len(everybody) - len(sides[0]), len(sides))
        values = values_of(contrast, sizes, for_all=True)
        for edit in (Edit.MISMATCH, Edit.ORDER):
            found[edit, everybody, ()] = Candidate(edit, everybody, (), contrast, values, is_for_all=True)
    return list(found.values())


def _sides(entered: Calls) -> list[Ranks]:
    """Return the ranks in one call each, the largest sides first."""
    found: dict[object, list[int]] = {}
    for rank, call in sorted(entered.items()):
        found.setdefault((call.place, call.shape), []).append(rank)
    return sorted(map(tuple, found.values()), key=lambda side: (-len(side), side))


def _of_one_place(sides: Sequence[Ranks]) -> Iterable[tuple[Sequence[Edit], Ranks, Ranks]]:
    """Yield (edits, ranks, others) of ranks that met in one place of a group's sequence by different calls."""
    edits = (Edit.SKIP, Edit.EXTRA, Edit.MISMATCH)
    for side in sides[:MOST_SIDES]:
        yield edits, side, next(s for s in sides if s is not side)
    if len(sides) > 2:
        yield edits, tuple(sorted(r for side in sides[1:] for r in side)), sides[0]


def _of_waits(
    evidence: Evidence, entered: Calls, sides: Sequence[Ranks]
) -> Iterable[tuple[Sequence[Edit], Ranks, Ranks]]:
    """Yield (edits, ranks, others) of ranks that wait in several places: for each place, those inside and those that it lacks; of
    one call in several groups, as each of them has it, those of all these groups together as well.
    """
    lacks = lacking(entered.values(), entered, rings(evidence), evidence.members)
    of_absent, of_inside = (Edit.SKIP, Edit.MISMATCH, Edit.ORDER), (Edit.EXTRA, Edit.MISMATCH, Edit.ORDER)
    kinds: dict[object, list[Ranks]] = {}
    for side in sides:
        kinds.setdefault(token(entered[side[0]]), []).append(side)
    for alike in list(kinds.values())[:MOST_SIDES]:
        together = tuple(sorted(r for side in alike for r in side))
        for inside in dict.fromkeys((*alike[:MOST_SIDES], together)):
            lacked = set().union(*(lacks[entered[r].place] for r in inside))
            absent = tuple(sorted(lacked - set(inside)))
            yield of_absent, absent, inside
            yield of_inside, inside, absent
            for some in _sides({r: entered[r] for r in absent})[:MOST_SIDES]:
                yield of_absent, some, inside
    bits: dict[object, float] = {}  # of thousands of ranks, most made the same calls
    costs = {}
    for rank, call in entered.items():
        history = tuple(token(c) for c in calls_before(evidence, rank, call))
        key = (history, token(call))
        costs[rank] = bits[key] = bits[key] if key in bits else surprise(history, token(call))
    odd = tuple(sorted(r for r, cost in costs.items() if cost > min(costs.values()) + ODD_BITS))
    yield (Edit.ORDER, Edit.SKIP), odd, tuple(r for r in sorted(entered) if r not in odd)


def _representative(evidence: Evidence, ranks: Ranks) -> int:
    """Return a rank that left a stack, if any: who was aborted left none."""
    return next((r for r in ranks if evidence.ranks[r].last_stack is not None), ranks[0])
