"""Which rank of a training ended first that no process watched: by what the others wrote.

A launcher ends the ranks that are left with SIGTERM, at which they write their stacks; or they have raised as the connection
was lost. A rank with neither, and without an end, was gone before: killed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pytest_nsa.evidence.values import RankEvidence
from pytest_nsa.wire.files import read_text

TERMINATED = "terminated.txt"


def with_the_first_gone(ranks: Sequence[RankEvidence]) -> tuple[RankEvidence, ...]:
    """Return the ranks; those without an end are ``gone`` since their heartbeat last beat, where others know of theirs."""
    knowing = {r.rank for r in ranks if r.exceptions or read_text(r.folder / TERMINATED, 1)}
    return tuple(
        r if not knowing or r.rank in knowing or r.finished or r.gone else replace(r, gone=_last_sign(r)) for r in ranks
    )


def _last_sign(rank: RankEvidence) -> float:
    numbers = rank.board.numbers if rank.board is not None else {}
    return numbers.get("beat_time") or numbers.get("phase_time", 0.0)
