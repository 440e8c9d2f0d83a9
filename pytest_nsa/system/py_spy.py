"""py-spy, if it is installed: the stacks of another process's threads."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path


def program() -> str | None:
    """Return the path of py-spy: from PATH, or in the folder of this interpreter (its environment need not be activated)."""
    return shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))


def dump(pid: int, *options: str, limit_s: float) -> tuple[str, str]:
    """Return (output of ``py-spy dump``, '') for a process of this user, which it pauses for a moment; or ('', reason)."""
    tool = program()
    if tool is None:
        return "", "py-spy is not installed"
    try:
        done = subprocess.run(
            [tool, "dump", *options, "--pid", str(pid)], text=True, capture_output=True, timeout=limit_s, check=False
        )
    except (subprocess.TimeoutExpired, OSError) as error:
        return "", f"py-spy gave nothing: {type(error).__name__}"
    if done.returncode or not done.stdout:
        output = "; ".join(done.stderr.strip().splitlines())[:200]
        return "", f"py-spy could not look: {output or 'no reason given'}"
    return done.stdout, ""
