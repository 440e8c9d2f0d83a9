"""Which rank of a training ended first that no process watched: by what the others wrote.

A launcher ends the ranks that are left with SIGTERM, at which they write their stacks; or they have raised as the connection
was lost. A rank with neither, and without an end, was gone before: killed.
"""

from __future__ import annotations

from pathlib import Path

from pytest_nsa.evidence.board import BoardSnapshot
from pytest_nsa.wire.files import read_text

TERMINATED = "terminated.txt"


def gone_before_others(folder: Path, board: BoardSnapshot | None) -> float:
    """Return when the heartbeat of a rank without an end last beat, where others know of theirs and it does not; else 0.0."""
    if board is None or _knows_of_its_end(folder):
        return 0.0
    if not any(map(_knows_of_its_end, folder.parent.glob("rank*"))):
        return 0.0
    return board.numbers.get("beat_time") or board.numbers.get("phase_time", 0.0)


def _knows_of_its_end(folder: Path) -> bool:
    return bool(read_text(folder / TERMINATED, 1)) or '"event": "exception"' in read_text(folder / "events.jsonl")
