"""Which rank of a training ended first, if no process watched it: derived from what the other ranks wrote.

At SIGTERM, by which a launcher ends the remaining ranks, a rank writes its stacks; at a lost connection it raises. A rank with
neither, and without an end, was killed before the others ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pytest_nsa.evidence.board import BoardSnapshot
from pytest_nsa.evidence.values import STILL_LOOKS, RankEvidence
from pytest_nsa.wire.files import read_text

TERMINATED = "terminated.txt"
BEAT_S = 0.05  # between two heartbeats, at least


def mark_first_gone(ranks: Sequence[RankEvidence]) -> tuple[RankEvidence, ...]:
    """Return the ranks; if some recorded their end, those that did not are ``gone`` since their last heartbeat."""
    ended = {r.rank for r in ranks if r.exceptions or r.signal or read_text(r.folder / TERMINATED, 1)}
    return tuple(
        r if not ended or r.rank in ended or r.finished or r.gone else replace(r, gone=last_beat(r.board))
        for r in ranks
    )


def last_beat(board: BoardSnapshot | None) -> float:
    """Return when a rank's heartbeat last beat, 0.0 if it never did."""
    numbers = board.numbers if board is not None else {}
    return numbers.get("beat_time") or numbers.get("phase_time", 0.0)


def stalled_until_the_end(ranks: Sequence[RankEvidence]) -> float:
    """Return for how many seconds no rank that had not finished moved before its end, by what their heartbeats saw; 0.0 for less
    than a stall.
    """
    looks = [r.board.numbers.get("still_looks", 0.0) for r in ranks if not r.finished and r.board is not None]
    return min(looks) * BEAT_S if looks and min(looks) >= STILL_LOOKS else 0.0
