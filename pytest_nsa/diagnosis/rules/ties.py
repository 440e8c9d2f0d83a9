"""Findings that rest on a tie: as many ranks did the one as did the other, in no earlier round, under no condition on the rank.

Nothing then shows which side is wrong. Such a finding names what is the more likely, and is not certain.
"""

from __future__ import annotations

import ast
from dataclasses import replace

from pytest_nsa.diagnosis.explain.branches import names_the_rank
from pytest_nsa.diagnosis.explain.locations import user_frames
from pytest_nsa.diagnosis.facts import awaited
from pytest_nsa.diagnosis.verdict import Finding
from pytest_nsa.evidence.values import Evidence

CONFIDENCE = 0.55
_OF_A_CHOICE = ("skipped_collective", "extra_collective", "collective_mismatch", "p2p_unmatched")


def weakened(evidence: Evidence, finding: Finding) -> Finding:
    """Return the finding, not certain where it rests on a tie."""
    if not finding.certain:
        return finding
    if finding.cause == "group_order_deadlock":
        rests = not _has_had_both(evidence)
    else:
        rests = finding.cause in _OF_A_CHOICE and _is_a_tie(evidence, finding)
    return replace(finding, certain=False, confidence=min(finding.confidence, CONFIDENCE)) if rests else finding


def _is_a_tie(evidence: Evidence, finding: Finding) -> bool:
    """Return whether half of the ranks that a call concerns are named, no round before had one of the calls that the two sides are
    in, and those that are said to have made one alone are under no condition on the rank.
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
    if any(c.site in sites and c.left for rank in concerned for c in evidence.ranks[rank].collectives):
        return False
    return finding.cause != "extra_collective" or not _is_under_a_condition(evidence, finding)


def _is_under_a_condition(evidence: Evidence, finding: Finding) -> bool:
    frames = [f.describe() for f in user_frames(evidence.ranks[finding.ranks[0]])]
    around = (s for place in (finding.where, *frames) for s in evidence.sources.around(place))
    return any(isinstance(s, ast.If) and names_the_rank(s.test) for s in around)


def _has_had_both(evidence: Evidence) -> bool:
    """Return whether each rank that waits in one of several groups has made calls of another one of them before: only then is it
    known that their order is what differs.
    """
    waits = {r.rank: c for r in evidence.ranks if not r.finished and (c := awaited(r)) is not None}
    groups = {c.process_group for c in waits.values()}
    return all(
        any(c.process_group in groups - {waits[rank].process_group} for c in evidence.ranks[rank].collectives)
        for rank in waits
    )
