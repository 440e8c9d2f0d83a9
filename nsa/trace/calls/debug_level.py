"""Replace torch's debug level DETAIL by INFO on gloo, where it ends DDP by SIGSEGV (torch 2.13 on a CPU)."""

import os

VARIABLE = "TORCH_DISTRIBUTED_DEBUG"


def lower_detail(backend: str) -> str:
    """Set DETAIL to INFO for a group on gloo, and return why; '' if it was not DETAIL. torch reads the variable at import."""
    if backend != "gloo" or os.environ.get(VARIABLE, "").upper() != "DETAIL":
        return ""
    os.environ[VARIABLE] = "INFO"
    return f"{VARIABLE}=DETAIL crashes DDP on gloo (SIGSEGV, seen with torch 2.13)"
