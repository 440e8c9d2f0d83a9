"""The edits of the ranks' common program that would explain why ranks are in different calls."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pytest_nsa.diagnosis.explain.contrast import Contrast
from pytest_nsa.diagnosis.explain.keys import Keys, Wanted, get_kind, key_values
from pytest_nsa.diagnosis.explain.message_terms import message_values
from pytest_nsa.diagnosis.explain.messages import END, KEY, Messages, Owed, get_line, is_collective
from pytest_nsa.diagnosis.explain.program import Order
from pytest_nsa.diagnosis.explain.rhythm import surprise, token
from pytest_nsa.diagnosis.explain.terms import compute_values, position_values, size_values
from pytest_nsa.diagnosis.facts import list_earlier_calls, racing, rings
from pytest_nsa.evidence.board import Collective
from pytest_nsa.evidence.collectives import lacking
from pytest_nsa.evidence.values import Evidence

MOST_SIDES = 24  # sides that are compared
MOST_LIKE = 8  # ranks of a side that are compared with those of another
MOST_PAIRS = 64  # pairs of a waiting rank and its peer
ODD_BITS = 2.0  # excess surprise that makes a rank's call odd

Ranks = tuple[int, ...]
Calls = Mapping[int, Collective]  # by rank, the call that it is in


class Edit(enum.Enum):
    """What some ranks did differently from the program that all ranks run."""

    SKIP = enum.auto()
    EXTRA = enum.auto()
    MISMATCH = enum.auto()
    ORDER = enum.auto()
    UNANSWERED = enum.auto()  # they did not make the other half of a message
    MISDIRECTED = enum.auto()  # they addressed a rank that does not wait for them
    UNASKED = enum.auto()  # they made a send or receive that no rank answers
    UNSET = enum.auto()  # they did not set a key that ranks wait for
    NEVER_SET = enum.auto()  # they wait for a key that no rank sets

    @property
    def cause(self) -> str:
        """The edit's cause in the registry."""
        return {
            Edit.SKIP: "skipped_collective", Edit.EXTRA: "extra_collective", Edit.MISMATCH: "collective_mismatch",
            Edit.ORDER: "group_order_deadlock", Edit.UNSET: "missing_collective", Edit.NEVER_SET: "missing_collective",
        }.get(self, "p2p_unmatched")  # fmt: skip


@dataclass(frozen=True)
class Candidate:
    """An edit by ``ranks``: they skipped the call of ``others``, made an extra or a different call, or used groups in
    another order.

    ``is_for_all``: the edit names all ranks, because nothing shows which of them are right.
    """

    edit: Edit
    ranks: Ranks
    others: Ranks
    contrast: Contrast
    values: Mapping[str, float]  # values of its terms, by name
    is_for_all: bool = False
    owed: Owed | None = None  # the message that a rank waits for
    wanted: Wanted | None = None  # the keys that ranks wait for

    @property
    def is_of_a_collective(self) -> bool:
        """Whether the edit is that some ranks alone skipped, or made, a collective that ranks wait in."""
        calls = {Edit.SKIP: self.contrast.other_call, Edit.EXTRA: self.contrast.call}
        return self.edit in calls and is_collective(calls[self.edit])

    @property
    def is_refuted(self) -> bool:
        """Whether counted positions contradict the edit, after equal histories of the two ranks: a rank that is behind has not
        passed a call over, and one that is ahead has not added a call before the others'. Nor has a rank omitted its half of
        a message that was asked for once too often.
        """
        if self.edit is Edit.UNANSWERED and self.owed is not None:
            return self.owed.is_asked_once_too_often
        impossible = {Edit.SKIP: Order.BEFORE, Edit.EXTRA: Order.AFTER}.get(self.edit)
        one = self.contrast
        is_counted = one.compared.is_counted and one.order is impossible
        return is_counted and bool(one.history) and one.history == one.turned.history

    def about(self, term: str) -> Ranks:
        """Return the ranks that a term describes. ``term`` is a name of the table of weights."""
        side = term.partition(": ")[0]
        if self.wanted is not None and side in ("asker", "setter"):
            return self.wanted.waiters if side == "asker" else (self.wanted.peer,)
        if self.owed is None:
            return self.others if side == "others" else self.ranks
        of_one = {"waiter": self.owed.waiter, "peer": self.owed.peer, "others": self.contrast.other_number}
        return (of_one[side],) if side in of_one else self.ranks

    @property
    def kind(self) -> str:
        """The edit's column in the table of weights."""
        return self.edit.name.lower() + (" by all" if self.is_for_all else "")


class _Contrasts:
    """The ranks compared in pairs, each pair once."""

    def __init__(self, evidence: Evidence, entered: Calls) -> None:
        self._evidence, self._entered = evidence, entered
        self._found: dict[tuple[int, int], Contrast] = {}

    def between(self, one: int, other: int) -> Contrast:
        if (one, other) not in self._found:
            contrast = Contrast(self._evidence, one, self._entered[one], other, self._entered[other])
            self._found |= {(one, other): contrast, (other, one): contrast.turned}
        return self._found[one, other]


def candidates(evidence: Evidence, entered: Calls) -> list[Candidate]:
    """Return the edits that would explain ``entered``: ranks in different calls at one place of a sequence, or waiting
    at several places.
    """
    sides = _sides(entered)
    places = {c.place for c in entered.values()}
    pairs = (
        _sides_at_one_place(evidence, entered, sides)
        if len(places) == 1 and len(sides) > 1
        else _sides_in_waits(evidence, entered, sides)
    )
    found: dict[tuple[Edit, Ranks, Ranks], Candidate] = {}
    contrasts = _Contrasts(evidence, entered)
    for edits, ranks, others in pairs:
        if not ranks or not others:
            continue
        contrast = contrasts.between(*_closest(evidence, entered, ranks, others))
        values = compute_values(contrast, size_values(len(ranks), len(others)))
        values |= _others_there(ranks, entered)
        for edit in edits:
            found.setdefault((edit, ranks, others), Candidate(edit, ranks, others, contrast, values))
    everybody = tuple(sorted(entered))
    # Such a rank made no collective in place of this one.
    if not all(map(is_collective, entered.values())):
        of_calls = [c for c in found.values() if c.is_of_a_collective]
        return [*of_calls, *_of_messages(evidence, entered), *_of_keys(evidence, entered, sides)]
    if found:
        contrast = next(iter(found.values())).contrast
        sizes = size_values(len(sides[0]), len(everybody) - len(sides[0]))
        values = compute_values(contrast, sizes, for_all=True)
        for edit in (Edit.MISMATCH, Edit.ORDER):
            found[edit, everybody, ()] = Candidate(edit, everybody, (), contrast, values, is_for_all=True)
    return list(found.values())


def _sides(entered: Calls) -> list[Ranks]:
    """Return the ranks grouped by call, the largest group first."""
    found: dict[object, list[int]] = {}
    for rank, call in sorted(entered.items()):
        found.setdefault((call.place, call.shape), []).append(rank)
    return sorted(map(tuple, found.values()), key=lambda side: (-len(side), side))


def _sides_at_one_place(
    evidence: Evidence, entered: Calls, sides: Sequence[Ranks]
) -> Iterable[tuple[Sequence[Edit], Ranks, Ranks]]:
    """Yield (edits, ranks, others) for ranks that made different calls at one place of a group's sequence.

    A race of two threads explains the difference: no call was skipped or added.
    """
    edits = (Edit.MISMATCH,) if racing(evidence, entered) else (Edit.SKIP, Edit.EXTRA, Edit.MISMATCH)
    for side in sides[:MOST_SIDES]:
        yield edits, side, next(s for s in sides if s is not side)
    if len(sides) > 2:
        yield edits, tuple(sorted(r for side in sides[1:] for r in side)), sides[0]


def _sides_in_waits(
    evidence: Evidence, entered: Calls, sides: Sequence[Ranks]
) -> Iterable[tuple[Sequence[Edit], Ranks, Ranks]]:
    """Yield (edits, ranks, others) for ranks that wait at several places: for each place, the ranks inside and the
    ranks missing.

    Where ranks make one call in several groups of the same kind, these groups are also taken together.
    """
    lacks = lacking(entered.values(), entered, rings(evidence), evidence.members)
    of_absent, of_inside = (Edit.SKIP, Edit.MISMATCH, Edit.ORDER), (Edit.EXTRA, Edit.MISMATCH, Edit.ORDER)
    kinds: dict[object, list[Ranks]] = {}
    for side in sides:
        kinds.setdefault(token(entered[side[0]]), []).append(side)
    for alike in [found for found in kinds.values() if is_collective(entered[found[0][0]])][:MOST_SIDES]:
        together = tuple(sorted(r for side in alike for r in side))
        for inside in dict.fromkeys((*alike[:MOST_SIDES], together)):
            lacked = set().union(*(lacks[entered[r].place] for r in inside))
            absent = tuple(sorted(lacked - set(inside)))
            yield of_absent, absent, inside
            yield of_inside, inside, absent
            for some in _sides({r: entered[r] for r in absent})[:MOST_SIDES]:
                yield of_absent, some, inside
    bits: dict[object, float] = {}  # of thousands of ranks, most have the same history
    costs = {}
    for rank, call in entered.items():
        history = tuple(token(c) for c in list_earlier_calls(evidence, rank, call))
        key = (history, token(call))
        costs[rank] = bits[key] = bits[key] if key in bits else surprise(history, token(call))
    odd = tuple(sorted(r for r, cost in costs.items() if cost > min(costs.values()) + ODD_BITS))
    usual = tuple(r for r in sorted(entered) if r not in odd)
    yield (Edit.ORDER,), odd, usual
    missing = set().union(*(lacks[entered[r].place] for r in usual if is_collective(entered[r])))
    yield (Edit.SKIP,), tuple(r for r in odd if r in missing), usual


def _of_messages(evidence: Evidence, entered: Calls) -> list[Candidate]:
    """Return the edits that would explain unpaired sends and receives: of each waiting rank, of each peer, and of all
    ranks in the same position.
    """
    messages = Messages(evidence, {rank: c for rank, c in entered.items() if c.op not in (END, KEY)})
    pairs = [owed for owed in messages.pairs() if owed.peer in entered]
    if not pairs:
        return []
    found: dict[tuple[Edit, Ranks, bool], Candidate] = {}
    contrasts = _Contrasts(evidence, entered)

    def add(edit: Edit, ranks: Iterable[int], owed: Owed, *, is_for_all: bool = False) -> None:
        named = tuple(sorted(ranks))
        if not named or (edit, named, is_for_all) in found:
            return
        blames_waiter = edit is not Edit.UNANSWERED
        one, other = (owed.waiter, owed.peer) if blames_waiter else (owed.peer, owed.waiter)
        values = message_values(owed)
        contrast = contrasts.between(one, other)
        if not is_for_all:
            values |= position_values(contrast)
        values |= size_values(len(named), len(evidence.ranks) - len(named))
        values |= _others_there(named, entered)
        others = tuple(r for r in sorted(entered) if r not in named)
        found[edit, named, is_for_all] = Candidate(edit, named, others, contrast, values, is_for_all, owed)

    lines: dict[object, list[Owed]] = {}
    for owed in pairs[:MOST_PAIRS]:
        lines.setdefault(get_line(owed.call), []).append(owed)
        add(Edit.UNASKED, (owed.waiter,), owed)
        add(Edit.UNANSWERED, (owed.peer,), owed)
        if owed.is_offered:
            add(Edit.MISDIRECTED, (owed.waiter,), owed)
    for alike in [*lines.values(), pairs]:
        add(Edit.UNASKED, {owed.waiter for owed in alike}, alike[0])
        add(Edit.UNANSWERED, {owed.peer for owed in alike}, alike[0])
    outside = {owed.peer for owed in pairs} - messages.pending.keys()
    add(Edit.UNANSWERED, outside, next((o for o in pairs if o.peer in outside), pairs[0]))
    add(Edit.UNASKED, messages.pending, pairs[0], is_for_all=True)
    return list(found.values())


def _of_keys(evidence: Evidence, entered: Calls, sides: Sequence[Ranks]) -> list[Candidate]:
    """Return the edits that would explain waits for keys of a store: of the ranks that wait for one key, of each rank that
    might have set it, and of all that wait.
    """
    keys = Keys(evidence, entered)
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank in keys.waiting:
        alike.setdefault(keys.wanted(rank), []).append(rank)
    found: dict[tuple[Edit, Ranks, bool], Candidate] = {}
    contrasts = _Contrasts(evidence, entered)

    def add(edit: Edit, ranks: Iterable[int], wanted: Wanted, *, is_for_all: bool = False) -> None:
        named = tuple(sorted(ranks))
        others = tuple(r for r in sorted(entered) if r not in named)
        if not named or (edit, named, is_for_all) in found:
            return
        waiting = tuple(r for r in wanted.waiters if r not in named)
        other = _representative(evidence, waiting or others or named[1:] or named)
        contrast = contrasts.between(_representative(evidence, named), other)
        values = key_values(wanted) | ({} if is_for_all else position_values(contrast))
        values |= size_values(len(named), len(evidence.ranks) - len(named))
        found[edit, named, is_for_all] = Candidate(edit, named, others, contrast, values, is_for_all, wanted=wanted)

    outside = [rank for rank in entered if rank not in keys.waiting]
    for names, waiters in [(n, w) for n, w in alike.items() if n][:MOST_SIDES]:
        asked = tuple(waiters)
        owners = keys.owners(names)
        usual = owners or set(keys.sets.get(get_kind(names[0]), ()))
        setter = next(iter(usual)) if len(usual) == 1 else None
        if len(keys.waiting) == len(entered):
            add(Edit.NEVER_SET, keys.waiting, Wanted(keys, asked, names, owners, setter), is_for_all=True)
        if len(waiters) < len(entered):
            add(Edit.NEVER_SET, asked, Wanted(keys, asked, names, owners, setter))
        others = sorted({*owners, *outside, *(entered if len(entered) <= MOST_SIDES else ())})
        for rank in others[:MOST_PAIRS]:
            add(Edit.UNSET, (rank,), Wanted(keys, asked, names, owners, rank))
        for several in (owners, outside, [rank for rank in entered if rank not in waiters]):
            if several:
                add(Edit.UNSET, several, Wanted(keys, asked, names, owners, min(several)))
    return list(found.values())


def _others_there(ranks: Ranks, entered: Calls) -> dict[str, float]:
    """Return the term that other ranks are in the call of ``ranks`` by the same lines."""
    call = entered[ranks[0]]
    others = (c for rank, c in entered.items() if rank not in ranks)
    return {"others there": 1.0} if call.op != END and any(c.lines == call.lines for c in others) else {}


def _representative(evidence: Evidence, ranks: Ranks) -> int:
    """Return a rank that left a stack, if any; an aborted rank leaves none."""
    return next((r for r in ranks if evidence.ranks[r].last_stack is not None), ranks[0])


def _closest(evidence: Evidence, entered: Calls, ranks: Ranks, others: Ranks) -> tuple[int, int]:
    """Return a rank of each side, the two that part last in the program: their calls share the most outer lines.

    Ranks of one side may have come to one call by different ways. An aborted rank leaves no stack, and is taken if all are.
    """
    some, rest = (
        ([r for r in side if evidence.ranks[r].last_stack is not None] or side)[:MOST_LIKE] for side in (ranks, others)
    )
    return max(itertools.product(some, rest), key=lambda pair: _outer_lines(*(entered[r].way for r in pair)))


def _outer_lines(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    pairs = zip(reversed(one), reversed(other), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
