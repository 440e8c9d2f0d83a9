"""Ranks that wait for keys of a store: the few at another key than most, or that went on without setting one."""

from __future__ import annotations

from collections import Counter

from pytest_nsa.diagnosis.facts import all_facts, last_seen
from pytest_nsa.diagnosis.verdict import Finding, describe_ranks
from pytest_nsa.evidence.values import Evidence, RankEvidence


def waits_for(rank: RankEvidence) -> str:
    """Return what a rank waits for, in words."""
    key = key_of(rank)
    return f"waits for a key of a store that no rank has set{f': {key}' if key else ''}"


def key_of(rank: RankEvidence) -> str:
    """Return the keys that a rank waits for in a store; '' where they are not known."""
    return rank.board.key if rank.board is not None else ""


def went_past(evidence: Evidence, waiting: list[RankEvidence]) -> Finding:
    """Conclude of most ranks, which wait for a key at one line, that the others went on without setting it."""
    n, ranks = evidence.job.world_size, tuple(r.rank for r in waiting)
    gone = tuple(r.rank for r in evidence.ranks if r.rank not in ranks)
    call = next((c for r in gone if (board := evidence.ranks[r].board) and (c := board.waits_in)), None)
    went = f"went on to {call.describe()}" if call is not None else "went on"
    where = last_seen(waiting[0])
    reason = f"{describe_ranks(gone, n)} {went}; {describe_ranks(ranks, n)} wait for a key of a store that is not set, at {where}"
    return Finding(
        cause="missing_collective",
        ranks=gone,
        where=where,
        reason=reason,
        confidence=0.7,
        facts=all_facts(evidence.ranks),
    )


def at_another(evidence: Evidence, waiting: list[RankEvidence]) -> Finding | None:
    """Find that of ranks which all wait at one line, most for one key, the others wait for another."""
    keys = {r.rank: key_of(r) for r in waiting}
    places = {last_seen(r) for r in waiting}
    (usual, number), *more = Counter(keys.values()).most_common()
    if not more or not all(keys.values()) or len(places) > 1 or 2 * number <= len(keys):
        return None
    n, odd = evidence.job.world_size, tuple(r for r, key in sorted(keys.items()) if key != usual)
    shown = ", ".join(sorted({keys[r] for r in odd}))
    return Finding(
        cause="missing_collective",
        ranks=odd,
        where=places.pop(),
        reason=f"{describe_ranks(odd, n)} waits for the key {shown} of a store, where the others wait for {usual}",
        confidence=0.8,
        facts=all_facts(evidence.ranks),
    )
