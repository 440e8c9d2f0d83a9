"""Memory of this rank: what it holds now and has held at most, on the host and on the GPU."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import torch

from nsa.trace.files import write_atomically

MIB = 1 << 20


def peak_mib() -> float:
    """Peak memory in MiB: of the CUDA allocator when a GPU is in use, else of the process."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / MIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def snapshot(step: int, rank: int) -> dict[str, float | int]:
    """Figures in MiB. ``rss`` and ``peak_rss`` are the process's; ``cuda_*`` are there when a GPU is in use."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    facts: dict[str, float | int] = {
        "step": step,
        "rank": rank,
        "rss_mib": pages * os.sysconf("SC_PAGE_SIZE") / MIB,
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        facts["cuda_allocated_mib"] = torch.cuda.memory_allocated() / MIB
        facts["cuda_reserved_mib"] = torch.cuda.memory_reserved() / MIB
        facts["cuda_peak_mib"] = torch.cuda.max_memory_allocated() / MIB
    return facts


def dump(folder: Path, step: int, rank: int) -> Path:
    """Write ``mem_step{N}_rank{r}.json`` and ``.txt`` (the same, for people); returns the former."""
    facts = snapshot(step, rank)
    target = folder / f"mem_step{step}_rank{rank}.json"
    write_atomically(target, json.dumps(facts) + "\n", follow=True)
    lines = [
        f"{name:>20}  {value:.1f}" if isinstance(value, float) else f"{name:>20}  {value}"
        for name, value in facts.items()
    ]
    if "cuda_allocated_mib" in facts:
        lines.append(torch.cuda.memory_summary(abbreviated=True))
    write_atomically(target.with_suffix(".txt"), "\n".join(lines) + "\n", follow=True)
    return target
