"""The second look, taken only when something stands still: first /proc, which disturbs nobody, last the stack dump."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pytest_nsa.artifacts import append_line
from pytest_nsa.watch.process import ProcessState, look_at

SAMPLE_S = 0.4
BUSY_SAMPLE_S = 0.2
DUMP_WAIT_S = 2.0


def sample_processes(pids: Mapping[int, int], evidence: Path) -> None:
    """Two looks at each rank (rank -> pid), ``SAMPLE_S`` apart; appended to ``evidence`` as one line a rank."""
    first = {rank: look_at(pid) for rank, pid in pids.items()}
    started = time.monotonic()
    time.sleep(SAMPLE_S)
    elapsed = time.monotonic() - started
    for rank, pid in pids.items():
        before, after = first[rank], look_at(pid)
        if before is not None and after is not None:
            append_line(
                evidence,
                {
                    "event": "process",
                    "time": time.time(),
                    "rank": rank,
                    **_difference(before, after, elapsed),
                },
            )


def _difference(before: ProcessState, after: ProcessState, elapsed: float) -> dict[str, Any]:
    facts = asdict(after)
    facts["wants_cpu"] = before.state == after.state == "R"  # it may get little of it on a busy machine
    facts["cpu_share"] = round((after.cpu_s - before.cpu_s) / elapsed, 3)
    facts["switches_per_s"] = round((after.voluntary_switches - before.voluntary_switches) / elapsed, 1)
    return facts


def busy_ranks(pids: Mapping[int, int]) -> list[int]:
    """The ranks (rank -> pid) that use more than half a core over a moment."""
    before = {rank: look_at(pid) for rank, pid in pids.items()}
    time.sleep(BUSY_SAMPLE_S)
    found = []
    for rank, pid in pids.items():
        first, second = before[rank], look_at(pid)
        if first is not None and second is not None and second.cpu_s - first.cpu_s > 0.5 * BUSY_SAMPLE_S:
            found.append(rank)
    return found


def dump_stacks(ranks: Mapping[int, Path], send: Callable[[int], None]) -> None:
    """Ask each rank (rank -> its stacks.txt) for a dump by ``send(rank)``, and wait until the dumps are whole."""
    sizes = {rank: _size(path) for rank, path in ranks.items()}
    for rank in ranks:
        send(rank)
    deadline = time.monotonic() + DUMP_WAIT_S
    waiting = dict.fromkeys(ranks, -1)
    while waiting and time.monotonic() < deadline:
        time.sleep(0.02)
        for rank, last in list(waiting.items()):
            size = _size(ranks[rank])
            if size > sizes[rank] and size == last:
                del waiting[rank]
            else:
                waiting[rank] = size


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
