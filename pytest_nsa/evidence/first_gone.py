"""Which rank of a training ended first, if no process watched it: derived from what the other ranks wrote.

At SIGTERM, by which a launcher ends the remaining ranks, a rank writes its stacks; at a lost connection it raises. A rank with
neither, and without an end, was killed before the others ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pytest_nsa.evidence.values import RankEvidence
from pytest_nsa.wire.files import read_text

TERMINATED = "terminated.txt"


def mark_first_gone(ranks: Sequence[RankEvidence]) -> tuple[RankEvidence, ...]:
    """Return the ranks; if some recorded their end, those that did not are ``gone`` since their last heartbeat."""
    ended = {r.rank for r in ranks if r.exceptions or read_text(r.folder / TERMINATED, 1)}
    return tuple(
        r if not ended or r.rank in ended or r.finished or r.gone else replace(r, gone=_last_beat(r)) for r in ranks
    )


def _last_beat(rank: RankEvidence) -> float:
    numbers = rank.board.numbers if rank.board is not None else {}
    return numbers.get("beat_time") or numbers.get("phase_time", 0.0)
