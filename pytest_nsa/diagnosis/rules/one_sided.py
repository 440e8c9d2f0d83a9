"""Findings on a call that only some ranks made, or that they skipped: the first differing line, and whether the finding
rests on a tie.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pytest_nsa.diagnosis.explain.locations import where_ways_part
from pytest_nsa.diagnosis.facts import all_facts, awaited, rings
from pytest_nsa.diagnosis.rules.exits import is_victim
from pytest_nsa.diagnosis.rules.reasons import explained, ran_out
from pytest_nsa.diagnosis.rules.shifts import first_at_different_lines, first_shift, parted_before
from pytest_nsa.diagnosis.verdict import Finding, describe_ranks
from pytest_nsa.evidence.board import Collective
from pytest_nsa.evidence.collectives import by_place
from pytest_nsa.evidence.values import Evidence


def of_a_shift(evidence: Evidence) -> Finding | None:
    """Find the call that only some ranks made and that was paired with the others' next one."""
    shift = first_shift(evidence)
    if shift is None:
        return None
    who = describe_ranks(shift.ranks, evidence.job.world_size)
    here, there = where_ways_part(shift.extra.way, shift.usual.way)
    at = f" (called at {here} and at {there})" if shift.extra.site == shift.usual.site else ""
    reason = f"{who} entered {shift.extra.describe()}, which was paired with the others' {shift.usual.describe()}{at}"
    return Finding(
        cause="extra_collective", ranks=shift.ranks, where=shift.extra.site, called_from=here if at else "", certain=True,
        confidence=0.85, reason=f"{reason}: one call apart from then on", facts=all_facts(evidence.ranks),
    )  # fmt: skip


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


def of_an_earlier_call(evidence: Evidence, entered: Mapping[int, Collective]) -> Finding | None:
    """Find that some ranks skipped a call at or before the differing one, and met the others in it nevertheless."""
    found = parted_before(evidence, entered)
    if found is None:
        return None
    ranks, missed, made = found
    who = describe_ranks(ranks, evidence.job.world_size)
    reason = f"{who} went on without {missed.describe()}, and was paired with the others in it by {made.describe()} (call skipped)"
    return skipped(evidence, ranks, missed, reason)


def met_another_call(evidence: Evidence) -> Finding | None:
    """Find that ranks met in two similar calls, and one of them raised, or was killed, because of what it received."""
    ends = [e.time for r in evidence.ranks for e in r.exceptions if not is_victim(e)]
    ends += [r.exit_time for r in evidence.ranks if r.signal and not r.by_us]
    if not ends:
        return None
    calls = {r: [c for c in ring if c.peer == -1 and c.entered < min(ends)] for r, ring in rings(evidence).items()}
    latest = {place: found for place, found in by_place(calls).items() if len(found) == len(evidence.members(place[0]))}
    for group in sorted({place[0] for place in latest}):
        place = max(p for p in latest if p[0] == group)
        found = (
            of_an_earlier_call(evidence, latest[place]) if len({c.shape for c in latest[place].values()}) == 1 else None
        )
        if found is not None:
            return found
    return None


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
