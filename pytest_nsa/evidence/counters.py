"""The counters of the loops that a rank is in, as it wrote them when the monitor asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from pytest_nsa.evidence.board import BoardSnapshot
from pytest_nsa.evidence.shapes import is_number
from pytest_nsa.wire.files import parse, read_text

FILE = "counters.json"
LARGEST = 4 << 20  # bytes


def read_counters(folder: Path, board: BoardSnapshot | None, until: float) -> Any:
    """Return what counters.json has; None where the rank has entered a call since it was written, and before ``until``."""
    counters = parse(read_text(folder / FILE, LARGEST))
    written = counters.get("time") if isinstance(counters, dict) else None
    if board is None or not is_number(written):
        return counters
    return None if any(written < c.entered <= until for c in board.collectives[-1:]) else counters


def reported(counters: Any, name: str, check: Callable[[Any], bool]) -> list[Mapping[str, Any]]:
    """Return the ``frames`` that a rank reported when its test was ended, or the ``files`` that it looked for; [] without any."""
    found = counters.get(name) if isinstance(counters, dict) else None
    return found if isinstance(found, list) and all(map(check, found)) else []


def counted(frames: Iterable[Mapping[str, Any]]) -> tuple[tuple[str, Mapping[str, int]], ...]:
    return tuple((f["at"], {k: v for k, v in f["counters"].items() if isinstance(v, int)}) for f in frames)
