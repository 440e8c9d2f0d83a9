"""torch's debug level DETAIL ends DDP on gloo by SIGSEGV (torch 2.13 on a CPU): INFO in its place."""

from __future__ import annotations

import os

VARIABLE = "TORCH_DISTRIBUTED_DEBUG"


def lower_detail(backend: str) -> str:
    """Set DETAIL to INFO for a group on gloo, and return why; '' where nothing was to be done. torch reads it as it is imported."""
    if backend != "gloo" or os.environ.get(VARIABLE, "").upper() != "DETAIL":
        return ""
    os.environ[VARIABLE] = "INFO"
    return f"{VARIABLE}=DETAIL crashes DDP on gloo (SIGSEGV, seen with torch 2.13)"
