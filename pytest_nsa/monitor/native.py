"""Native frames of a rank, by py-spy where it is installed and the kernel lets it look: what C++ is at, to the symbol."""

from __future__ import annotations

from pathlib import Path

from pytest_nsa.system import py_spy

LIMIT_S = 8.0  # symbols of a large library take seconds


def dump_native(pid: int, path: Path) -> str:
    """Write py-spy's dump of a process of this user to ``path``; returns '' or the reason for its absence."""
    text, why_not = py_spy.dump(pid, "--native", limit_s=LIMIT_S)
    if not text:
        return why_not
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        return f"its dump could not be written: {error.strerror}"
    return ""
