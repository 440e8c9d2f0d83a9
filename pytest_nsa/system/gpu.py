"""What nvidia-smi reports of the GPUs at a stall: whether they compute, and how full they are."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

LIMIT_S = 5.0
_FIELDS = ("index", "utilization.gpu", "memory.used", "memory.total", "temperature.gpu", "pstate")


def look_at_gpus() -> list[dict[str, Any]]:
    """Return a dictionary a GPU (percent, MiB, °C); [] without nvidia-smi, or when it does not answer."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        done = subprocess.run(
            [tool, f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"], text=True, capture_output=True,
            timeout=LIMIT_S, check=False,
        )  # fmt: skip
    except (subprocess.TimeoutExpired, OSError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [dict(zip(_FIELDS, row, strict=True)) for row in rows if len(row) == len(_FIELDS)]
