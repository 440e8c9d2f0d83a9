"""Findings of a call that some ranks made alone, or that they alone left out."""

from __future__ import annotations

from pytest_nsa.diagnosis.explain.locations import where_ways_part
from pytest_nsa.diagnosis.facts import all_facts, rings
from pytest_nsa.diagnosis.rules.exits import is_victim
from pytest_nsa.diagnosis.rules.origins import origin_of
from pytest_nsa.diagnosis.rules.reasons import are_behind, explained, ran_out
from pytest_nsa.diagnosis.rules.rounds import Apart
from pytest_nsa.diagnosis.rules.shifts import first_shift, parted_before
from pytest_nsa.diagnosis.verdict import Finding, describe_ranks
from pytest_nsa.evidence.board import Collective
from pytest_nsa.evidence.collectives import by_place
from pytest_nsa.evidence.values import Evidence


def of_rounds(evidence: Evidence, apart: Apart | None, shown: str) -> Finding | None:
    """Find by the ranks' own rounds that some of them left out the call in which others wait, or made one that no round had."""
    if apart is None or (apart.missed is None and apart.extra is None):
        return None
    who = describe_ranks(apart.ranks, evidence.job.world_size)
    if apart.missed is not None and are_behind(evidence, apart.ranks):
        return None
    if apart.missed is not None:
        why = f"{who} went on without {apart.missed.describe()}, in which the others wait (call skipped): {shown}"
        return skipped(evidence, apart.ranks, apart.missed, why)
    assert apart.extra is not None
    return extra(evidence, apart.ranks, apart.extra, f"which no round before had: {shown}")


def extra(evidence: Evidence, culprits: tuple[int, ...], call: Collective, why: str) -> Finding:
    """Report that ``culprits`` entered ``call`` alone."""
    who = describe_ranks(culprits, evidence.job.world_size)
    culprits, cause, reason = explained(
        evidence, culprits, "extra_collective", f"{who} entered {call.describe()}, {why}"
    )
    return Finding(
        cause=cause, ranks=culprits, where=call.site, reason=reason, certain=True, confidence=0.85,
        facts=all_facts(evidence.ranks),
    )  # fmt: skip


def of_a_shift(evidence: Evidence) -> Finding | None:
    """Find the call that some ranks alone made, and that was taken for the others' next one."""
    shift = first_shift(evidence)
    if shift is None:
        return None
    who = describe_ranks(shift.ranks, evidence.job.world_size)
    here, there = where_ways_part(shift.extra.way, shift.usual.way)
    at = f" (called at {here} and at {there})" if shift.extra.site == shift.usual.site else ""
    why = f"{who} entered {shift.extra.describe()}, which the others took for {shift.usual.describe()}{at}"
    return Finding(
        cause="extra_collective", ranks=shift.ranks, where=shift.extra.site, called_from=here if at else "", certain=True,
        confidence=0.85, reason=f"{why}: one call apart from then on", facts=all_facts(evidence.ranks),
    )  # fmt: skip


def skipped(
    evidence: Evidence,
    culprits: tuple[int, ...],
    missed: Collective,
    reason: str,
    confidence: float = 0.9,
    certain: bool = True,
) -> Finding:
    """Report that ``culprits`` went on without ``missed``; the line to look at is the one where the others wait."""
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


def of_an_earlier_call(evidence: Evidence, entered: dict[int, Collective]) -> Finding | None:
    """Find that some ranks left a call out before, or at, the one in which ranks differ, and met the others in it all the same."""
    found = parted_before(evidence, entered)
    if found is None:
        return None
    ranks, missed, made = found
    who = describe_ranks(ranks, evidence.job.world_size)
    why = f"{who} went on without {missed.describe()}, and met the others in it by {made.describe()} (call skipped)"
    return skipped(evidence, ranks, missed, why)


def met_another_call(evidence: Evidence) -> Finding | None:
    """Find that ranks met in two calls that are alike, and one of them raised, or was ended, over what it got from the other."""
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
