"""Memory of this rank: its present size and its peak, on the host and on the GPU."""

import contextlib
import functools
import json
import os
import resource
from pathlib import Path

import torch

from nsa.trace.files import write_atomically

MIB = 1 << 20


def peak_mib() -> float:
    """Return the peak memory in MiB: of the CUDA allocator if a GPU is in use, else of the process."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / MIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


_PAGE = os.sysconf("SC_PAGE_SIZE")


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE / MIB


def on_gpu_mib() -> tuple[float, float] | None:
    """Return the memory that the CUDA allocator has allocated, and that it has reserved, in MiB; None if no GPU is in use."""
    if not torch.cuda.is_initialized():
        return None
    return torch.cuda.memory_allocated() / MIB, torch.cuda.memory_reserved() / MIB


@functools.cache  # a fork inherits it
def limit_mib() -> float:
    """Return the memory of this machine, or of its container, in MiB, which all ranks on it share."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    limit = next(int(line.split()[1]) for line in lines if line.startswith("MemTotal:")) / 1024
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # control groups, version 2 and 1
        with contextlib.suppress(OSError, ValueError):  # "max" is no limit
            limit = min(limit, int((Path("/sys/fs/cgroup") / name).read_text()) / MIB)
    return limit


def snapshot(step: int, rank: int) -> dict[str, float | int]:
    """Return figures in MiB: ``rss`` and ``peak_rss`` of the process; ``cuda_*`` if a GPU is in use."""
    facts: dict[str, float | int] = {
        "step": step,
        "rank": rank,
        "rss_mib": resident_mib(),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    on_gpu = on_gpu_mib()
    if on_gpu is not None:
        facts["cuda_allocated_mib"], facts["cuda_reserved_mib"] = on_gpu
        facts["cuda_peak_mib"] = torch.cuda.max_memory_allocated() / MIB
    return facts


def dump(folder: Path, step: int, rank: int, moment: str, mark: str = "") -> Path:
    """Write ``mem{mark}_{moment}_rank{r}.json`` and ``.txt`` (the same, for people); return the path of the former.

    ``moment``: boot, step1 or stall. ``mark``: `nsa.training.parallel.file_mark`.
    """
    facts = snapshot(step, rank)
    target = folder / f"mem{mark}_{moment}_rank{rank}.json"
    write_atomically(target, json.dumps(facts) + "\n", follow=True)
    lines = [
        f"{name:>20}  {value:.1f}" if isinstance(value, float) else f"{name:>20}  {value}"
        for name, value in facts.items()
    ]
    if "cuda_allocated_mib" in facts:
        lines.append(torch.cuda.memory_summary(abbreviated=True))
    write_atomically(target.with_suffix(".txt"), "\n".join(lines) + "\n", follow=True)
    return target
