"""Findings on a call that only some ranks made, or that they skipped: the first differing line, and whether the finding
rests on a tie.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pytest_nsa.diagnosis.explain.locations import where_ways_part
from pytest_nsa.diagnosis.facts import all_facts, awaited
from pytest_nsa.diagnosis.rules.reasons import explained, ran_out
from pytest_nsa.diagnosis.verdict import Finding, describe_ranks
from pytest_nsa.evidence.board import NEW_GROUP, Collective
from pytest_nsa.evidence.collectives import by_place
from pytest_nsa.evidence.values import Evidence


def skipped(
    evidence: Evidence,
    culprits: tuple[int, ...],
    missed: Collective,
    reason: str,
    confidence: float = 0.9,
    certain: bool = True,
) -> Finding:
    """Return the finding that ``culprits`` skipped ``missed``; the line to look at is the others' location."""
    left = origin_of(evidence, culprits, missed)
    culprits, cause, reason = explained(evidence, culprits, "skipped_collective", reason + left.since)
    reason += ran_out(evidence, culprits, cause)
    return Finding(
        cause=cause,
        ranks=culprits,
        where=left.where,
        called_from=left.called_from,
        reason=reason,
        certain=certain,
        confidence=confidence,
        facts=all_facts(evidence.ranks),
    )


@dataclass(frozen=True, slots=True)
class Origin:
    """The line of a skipped call, the line that called its function where that is known, and since when it was skipped,
    in words.
    """

    where: str
    called_from: str = ""
    since: str = ""


def origin_of(evidence: Evidence, culprits: tuple[int, ...], missed: Collective) -> Origin:
    """Return where the culprits left the others' path: at ``missed``, in which the others wait; or earlier, at a call
    that was paired with a similar next one, or at a call of another group in the same round.
    """
    differing = first_at_different_lines(evidence, culprits, missed)
    if differing is not None:
        theirs, mine = differing
        there, here = where_ways_part(theirs.way, mine.way)
        who = describe_ranks(culprits, evidence.job.world_size)
        since = f"; off by one call since {theirs.op} #{theirs.sequence}, which the others entered at {there}, {who} at {here}"
        return Origin(theirs.site, there if len(theirs.way) > 1 and there != theirs.site else "", since)
    return Origin(missed.site)


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


def _calls(evidence: Evidence, rank: int) -> list[Collective]:
    return [c for c in evidence.ranks[rank].collectives if c.peer == -1 and c.op != NEW_GROUP]


CONFIDENCE = 0.55
_OF_A_CHOICE = ("skipped_collective", "extra_collective", "collective_mismatch", "p2p_unmatched")


def weakened(evidence: Evidence, finding: Finding) -> Finding:
    """Return the finding, not certain where it rests on a tie."""
    if finding.cause not in _OF_A_CHOICE or not _is_a_tie(evidence, finding):
        return finding
    return replace(finding, certain=False, confidence=min(finding.confidence, CONFIDENCE))


def _is_a_tie(evidence: Evidence, finding: Finding) -> bool:
    """Return whether half of the ranks that a call concerns are culprits, and no earlier round had a call of either
    side.
    """
    named, waits = set(finding.ranks), {r.rank: c for r in evidence.ranks if (c := awaited(r)) is not None}
    made = [(r.rank, c) for r in evidence.ranks for c in r.collectives if c.site == finding.where]
    if not made:
        return False
    call = max((c for _, c in made), key=lambda c: c.entered)
    if call.peer != -1:
        concerned = {call.peer, *named, *(rank for rank, _ in made)}
        sites = {c.site for rank, c in waits.items() if rank in concerned}
    else:
        groups = {call.process_group, *(c.process_group for c in waits.values() if c.site == call.site)}
        concerned = {member for group in groups for member in evidence.members(group)}
        sites = {call.site, *(c.site for rank, c in waits.items() if rank in concerned)}
    if 2 * len(named) != len(concerned) or not concerned > named:
        return False
    return not any(c.site in sites and c.left for r in evidence.ranks if r.rank in concerned for c in r.collectives)
