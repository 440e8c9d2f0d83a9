"""The network that a group needs: an interface that is down, a host name that resolves to nothing, a port that is taken."""

from __future__ import annotations

from pytest_nsa.diagnosis.facts import all_facts, exception_fact
from pytest_nsa.diagnosis.verdict import Finding
from pytest_nsa.evidence.stacks import Frame
from pytest_nsa.evidence.values import Evidence


def unusable(evidence: Evidence) -> Finding | None:
    """Find that the first exception of all is of a network that cannot be used, as the rank found when it raised."""
    errors = sorted(((r, e) for r in evidence.ranks for e in r.exceptions), key=lambda pair: pair[1].time)
    if not errors or not errors[0][1].network:
        return None
    network = errors[0][1].network
    same = [(r, e) for r, e in errors if e.network]
    frame = Frame(errors[0][1].file, errors[0][1].line, errors[0][1].function)
    ranks = tuple(sorted({r.rank for r, _ in same}))
    return Finding(
        cause="network_unusable",
        ranks=ranks,
        where=frame.describe() if frame.is_user else "",
        reason=network,
        certain=True,
        confidence=0.95,
        facts=tuple(exception_fact(r, e) for r, e in same)
        + all_facts(tuple(r for r in evidence.ranks if r.rank not in ranks)),
    )
