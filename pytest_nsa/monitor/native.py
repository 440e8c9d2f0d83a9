"""Native frames of a rank, by py-spy where it is installed and the kernel lets it look: what C++ is at, to the symbol."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

LIMIT_S = 8.0  # symbols of a large library take seconds


def dump_native(pid: int, path: Path) -> str:
    """Write py-spy's dump of a process of this user to ``path``; returns '' or the reason for its absence."""
    tool = shutil.which("py-spy")
    if tool is None:
        return "py-spy is not installed"
    try:
        done = subprocess.run(
            [tool, "dump", "--native", "--pid", str(pid)], text=True, capture_output=True, timeout=LIMIT_S,
            check=False,
        )  # fmt: skip
    except (subprocess.TimeoutExpired, OSError) as error:
        return f"py-spy gave nothing: {type(error).__name__}"
    if done.returncode or not done.stdout:
        said = done.stderr.strip().splitlines()
        return f"py-spy could not look: {said[0][:200] if said else 'no reason given'}"
    try:
        path.write_text(done.stdout, encoding="utf-8")
    except OSError as error:
        return f"its dump could not be written: {error.strerror}"
    return ""
