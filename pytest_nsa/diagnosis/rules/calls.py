"""The rules for ranks in different calls: at one place of a group's sequence, or each in a call that cannot complete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pytest_nsa.diagnosis.explain.choose import Explanation, explain
from pytest_nsa.diagnosis.explain.edits import Calls, Edit
from pytest_nsa.diagnosis.explain.locations import diverging_lines
from pytest_nsa.diagnosis.explain.messages import END
from pytest_nsa.diagnosis.facts import STOPS, all_facts, find_awaited, last_seen, rings
from pytest_nsa.diagnosis.rules.exits import is_victim
from pytest_nsa.diagnosis.rules.reasons import explained
from pytest_nsa.diagnosis.verdict import Fact, Finding, describe_ranks
from pytest_nsa.diagnosis.words import (
    A_GROUP_A_THREAD,
    because,
    each_call,
    exhausted_loaders,
    list_terms,
    members_of_groups,
    race_of_threads,
)
from pytest_nsa.evidence.board import NEW_GROUP, Collective
from pytest_nsa.evidence.collectives import any_can_complete, by_place, deadlocked, find_awaited_ranks, first_departure
from pytest_nsa.evidence.values import Evidence

_OF_SKIPPED = ("skipped_collective", "data_dependent_branch", "hook_deadlock")  # causes that a skipped call may have


def departed(evidence: Evidence) -> Finding | None:
    """Find that ranks entered different collectives at the same place of their group's sequence."""
    entered = first_departure(rings(evidence))
    if entered is None or _raised_earlier(evidence, entered):
        return None
    return explain_calls(evidence, entered)


def waiting_in_different_calls(evidence: Evidence) -> Finding | None:
    """Find that every rank waits, in several collectives of which none can complete."""
    if evidence.stop not in (*STOPS, "left_alone") or not evidence.was_stalled:
        return None
    found = held_in_different_calls(evidence)
    return None if found is None else explain_calls(evidence, found)


def held_in_different_calls(evidence: Evidence) -> Calls | None:
    """Return the call that each rank waits in, where these are several collectives of which none can complete.

    A rank that does anything else is not included where the others wait for each other alone; nor is a rank that no
    other waits for.
    """
    alive = [r for r in evidence.ranks if not r.finished]
    found = find_awaited(alive)
    entered = rings(evidence)
    if any(not r.is_waiting for r in alive):
        waits = {r.rank: found[r.rank] for r in alive if r.is_waiting and r.rank in found}
        found = deadlocked(waits, entered, evidence.members)
        alive = [r for r in alive if r.rank in found]
    if len(alive) < 2 or len(found) < len(alive):
        return None
    if len({c.place for c in found.values()}) < 2 or any(c.peer != -1 for c in found.values()):
        return None
    if any_can_complete(found.values(), entered):
        return None
    held = {rank: found[rank] for rank in sorted(find_awaited_ranks(found, entered, evidence.members))}
    return held if len({c.place for c in held.values()}) > 1 else found


def explain_calls(evidence: Evidence, entered: Calls) -> Finding | None:
    """Return the finding that explains why ranks are in the different calls ``entered``; None where all are in one."""
    found = explain(evidence, entered)
    return None if found is None else make_calls_finding(evidence, entered, found)


def make_calls_finding(evidence: Evidence, entered: Calls, found: Explanation) -> Finding:
    """Return the finding for an explanation by an edit of collectives, with the line to look at."""
    n, edit = evidence.job.world_size, found.candidate.edit
    ranks, mine, other = found.candidate.ranks, found.candidate.contrast.call, found.candidate.contrast.other_call
    who, are_waiting = describe_ranks(ranks, n), len({c.place for c in entered.values()}) > 1
    shown = each_call(entered, n, with_steps=any(c.step for c in entered.values()))
    each = f"; {shown}" if len({c.describe() for c in entered.values() if c.op != END}) > 1 else ""
    values, terms = found.candidate.values, list_terms(found, n)
    name, of_others = f"another {mine.op}" if mine.op == other.op else mine.describe_number(), other.describe_number()
    payloads = f"; {mine.describe_payload()}, not {other.describe_payload()}" if mine.op == other.op else ""
    if edit is Edit.ORDER:
        reason = f"the ranks wait in different collectives; {shown}"
    elif found.candidate.is_for_all and len({(c.op, c.place) for c in entered.values()}) == 1:
        reason = f"the ranks gave different arguments; {shown}"
    elif found.candidate.is_for_all:
        reason = f"the ranks are in different collectives; {shown}"
    elif edit is Edit.SKIP and are_waiting:
        fewer = f"; {who} made fewer steps" if mine.op == END and mine.step < other.step else ""
        went = ("ended its test" if len(ranks) == 1 else "ended their tests") if mine.op == END else "went on"
        reason = f"{who} {went} without {of_others}, where the others wait{fewer}{each}"
    elif edit is Edit.SKIP:
        has_left = found.candidate.contrast.has_left
        left_loop = f"; {who} left the loop that the others are in{_within(found)}" if has_left else ""
        reason = f"{who} went on without {of_others}, and entered {name}{left_loop}{payloads}"
    elif edit is Edit.EXTRA and are_waiting:
        went = "ended without" if other.op == END else "went on without"
        reason = f"{who} entered {name}, which the others {went}{each}"
    else:
        round_ = "; it is in another round of the loop that the others left" if values.get("in a loop") else ""
        reason = f"{who} entered {name}, where the others entered {of_others}{round_}{payloads}"
    race = race_of_threads(evidence, entered)
    reason += members_of_groups(evidence, entered) + race + because(terms)
    culprits, cause, reason = explained(evidence, ranks, edit.cause, reason, entered)
    left = Origin(entered[culprits[0]].site if culprits[0] in entered else mine.site)
    if edit is Edit.SKIP and cause in _OF_SKIPPED:
        # For a skipped call, the line to look at is the others' call.
        left = find_origin(evidence, ranks, other)
        reason += left.since
    elif edit is Edit.EXTRA and cause == edit.cause and culprits == ranks:
        left = origin_of_extra(evidence, ranks, mine) or left
        reason += left.since
    reason += exhausted_loaders(evidence, culprits, cause)
    # Without the former, the call was not made from a user's line.
    where = left.where or next(filter(None, (last_seen(evidence.ranks[r]) for r in entered)), "")
    calls = () if are_waiting else tuple(
        Fact(rank=r, kind="collective", file=f"rank{r}/board.bin", text=f"entered {c.describe()} in step {c.step}")
        for r, c in sorted(entered.items())
    )  # fmt: skip
    return Finding(
        cause=cause, ranks=culprits, where=where, called_from=left.called_from, reason=reason, certain=found.is_certain,
        is_permanent=True, confidence=round(found.probability, 2), facts=calls + all_facts(evidence.ranks),
        terms=terms, advice=A_GROUP_A_THREAD if race else "",
    )  # fmt: skip


def _within(found: Explanation) -> str:
    """Return the line of a library that shows the order of two ranks, as ', at lightning/loop.py:40 in run'; '' for the user's."""
    within = found.candidate.contrast.compared.within
    return f", at {within[1].place.rpartition('-packages/')[2]}" if within else ""


def _raised_earlier(evidence: Evidence, entered: Calls) -> bool:
    """Return whether a rank had raised before it entered the differing call: the calls of its teardown are a
    consequence.
    """
    return any(
        error.time < c.entered and not is_victim(error)
        for rank, c in entered.items()
        for error in evidence.ranks[rank].exceptions
    )


@dataclass(frozen=True, slots=True)
class Origin:
    """The line of a skipped call, the line that called its function where that is known, and since when it was skipped,
    in words.
    """

    where: str
    called_from: str = ""
    since: str = ""


def find_origin(evidence: Evidence, culprits: tuple[int, ...], missed: Collective) -> Origin:
    """Return where the culprits left the others' path: at ``missed``, in which the others wait; or earlier, at a call
    that was paired with a similar next one, or at a call of another group in the same round.
    """
    differing = is_alone_inside(evidence, culprits, missed, of_culprits=False) or first_at_different_lines(
        evidence, culprits, missed
    )
    if differing is None:
        return Origin(missed.site)
    return _make_origin(*differing, "the others", describe_ranks(culprits, evidence.job.world_size))


def origin_of_extra(evidence: Evidence, culprits: tuple[int, ...], call: Collective) -> Origin | None:
    """Return where the culprits made an extra call before ``call``, in which they are: it was paired with the others' next call.
    None without one.
    """
    differing = is_alone_inside(evidence, culprits, call, of_culprits=True)
    if differing is None:
        return None
    return _make_origin(*differing, describe_ranks(culprits, evidence.job.world_size), "the others")


def _make_origin(call: Collective, paired: Collective, who: str, others: str) -> Origin:
    """Return the origin at ``call``, which ``who`` entered where the ``others`` entered ``paired``."""
    here, there = diverging_lines(call.way, paired.way)
    since = f"; off by one call since {call.op} #{call.sequence}, which {who} entered at {here}, {others} at {there}"
    return Origin(call.site, here if len(call.way) > 1 and here != call.site else "", since)


def is_alone_inside(
    evidence: Evidence, culprits: tuple[int, ...], until: Collective, *, of_culprits: bool
) -> tuple[Collective, Collective] | None:
    """Return the first call before ``until`` from a line at which only one side made calls, and the other side's with its number.

    ``of_culprits``: this side is the culprits. None if the sides differ in more than the calls from such lines, as ranks with
    different tasks do.
    """
    rings = _before(evidence, until)
    odd = [ring for rank, ring in rings.items() if rank in culprits]
    rest = [ring for rank, ring in rings.items() if rank not in culprits]
    if not odd or not rest or not all((*odd, *rest)):
        return None  # the group has members of one side alone, or a member made no call
    one, other = (odd, rest) if of_culprits else (rest, odd)
    known = {c.way for ring in other for c in ring}
    if not _agree(one) or not _agree([*other, *([c for c in ring if c.way in known] for ring in one)]):
        return None
    alone = next((i for i, c in enumerate(one[0]) if c.way not in known), len(one[0]))
    paired = other[0][alone] if alone < min(len(one[0]), len(other[0])) else None
    if paired is None or paired.way not in {until.way, *(c.way for c in one[0][alone:])}:
        return None
    return one[0][alone], paired


def _agree(rings: Sequence[Sequence[Collective]]) -> bool:
    """Return whether all ranks made their calls at the same lines in the same order, as far as each has come."""
    longest = max(rings, key=len)
    return all(c.way == its.way for ring in rings for c, its in zip(ring, longest, strict=False))


def _before(evidence: Evidence, call: Collective) -> dict[int, list[Collective]]:
    """Return the calls of a call's group that each of its ranks entered before it, from the first number that all have."""
    rings = {
        r: [c for c in evidence.ranks[r].collectives if c.peer == -1 and c.op != NEW_GROUP and c.group == call.group]
        for r in evidence.members(call.group)
    }
    first = max((ring[0].sequence for ring in rings.values() if ring), default=0)
    return {r: [c for c in ring if first <= c.sequence < call.sequence] for r, ring in rings.items()}


def first_at_different_lines(
    evidence: Evidence, culprits: tuple[int, ...], missed: Collective
) -> tuple[Collective, Collective] | None:
    """Return the first calls of ``missed``'s group that the culprits and the others made from different lines, before
    ``missed``, the culprits' first.

    The skipped call resembles the next one, so that neither side waited. None where lines differ by the program's
    design: they became equal again, and not because one sequence lags behind the other.
    """
    rings = _before(evidence, missed)
    whole = [found for _, found in sorted(by_place(rings).items()) if len(found) == len(rings)]
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
