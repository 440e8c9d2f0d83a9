"""Snapshots that are to be written, and that ranks have different values for."""

from __future__ import annotations

from pytest_nsa.diagnosis.verdict import Finding, describe_ranks
from pytest_nsa.evidence.snapshots import by_snapshot
from pytest_nsa.evidence.values import Evidence


def differing(evidence: Evidence) -> Finding | None:
    """Find a snapshot that gets a value by ``--snapshot-update``, and not the same one on all ranks that compare with it."""
    for (_, name), of_ranks in by_snapshot({r.rank: r.snapshots for r in evidence.ranks}).items():
        if len({snapshot.value for snapshot in of_ranks.values()}) > 1:
            ranks = tuple(sorted(of_ranks))
            who = describe_ranks(ranks, evidence.job.world_size)
            return Finding(
                cause="assertion",
                ranks=ranks,
                where=next(iter(of_ranks.values())).where,
                reason=f"{who} have different values for the snapshot {name!r}: none is written",
                advice="compare on one rank, or give each rank a snapshot: snapshot(name=f'rank{group.rank}')",
                certain=True,
                confidence=0.95,
            )
    return None
