"""Workers of an engine: a rank that reads its next request, while others wait in a call that it made in earlier ones."""

from __future__ import annotations

from pytest_nsa.diagnosis.facts import awaited, last_seen
from pytest_nsa.diagnosis.rules.alone import skipped
from pytest_nsa.diagnosis.verdict import Finding, describe_ranks
from pytest_nsa.evidence.values import Evidence


def left_out_of_a_request(evidence: Evidence) -> Finding | None:
    """Find the ranks that read from the process that started them, without the call that all others wait in.

    They have ended a request without it: who waits for their answer sends no other. That one of them got no request is as
    possible, and rarer, so the finding is not certain.
    """
    alive = [r for r in evidence.ranks if not r.finished]
    idle = [r for r in alive if r.process.get("reads_from_parent") and not r.is_waiting]
    waits = {r.rank: call for r in alive if r not in idle and (call := awaited(r)) is not None}
    if not idle or not waits or len(idle) + len(waits) < len(alive):
        return None
    missed = next(iter(waits.values()))
    made = all(any(c.site == missed.site and c.left > 0 for c in r.collectives) for r in idle)
    if missed.peer != -1 or not made or any(call.place != missed.place for call in waits.values()):
        return None
    n = evidence.job.world_size
    culprits = tuple(r.rank for r in idle)
    starter = f"process that started {'it' if len(idle) == 1 else 'them'}"
    reason = (
        f"{describe_ranks(culprits, n)} went on without {missed.describe()}, which earlier requests had, to read the next one from "
        f"the {starter} ({last_seen(idle[0])}); the others wait in the call"
    )
    return skipped(evidence, culprits, missed, reason, confidence=0.8, certain=False)
