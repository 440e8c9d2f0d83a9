"""Native frames of a rank, by py-spy where it is installed and the kernel permits it: the C++ functions that a rank is in."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from pytest_nsa.system import py_spy
from pytest_nsa.system.procfs import is_runnable
from pytest_nsa.wire.files import write_atomically

LIMIT_S = 8.0  # symbols of a large library take seconds
MOST_RANKS = 4  # a dump takes about two seconds


def dump_where_useful(
    files: Mapping[int, Path], pids: Mapping[int, int], blocked: Collection[int]
) -> Iterator[tuple[int, str]]:
    """Write native frames of at most `MOST_RANKS` ranks (rank -> its native.txt), those that want the CPU first; yield each rank
    with '' or the reason for the missing dump.

    A rank in ``blocked`` waits in a call that its board names: its native frames would show only the transport.
    """
    free = [rank for rank, pid in pids.items() if pid and rank not in blocked]
    chosen = sorted(free, key=lambda rank: not is_runnable(pids[rank]))[:MOST_RANKS]
    for rank, pid in pids.items():
        if rank in chosen:
            yield rank, dump_native(pid, files[rank])
        elif not pid:
            yield rank, "it runs on another node"
        else:
            yield rank, "it waits in a collective" if rank in blocked else f"{MOST_RANKS} other ranks were looked at"


def dump_native(pid: int, path: Path) -> str:
    """Write py-spy's dump of a process of this user to ``path``; returns '' or the reason for its absence."""
    text, why_not = py_spy.dump(pid, "--native", limit_s=LIMIT_S)
    if not text:
        return why_not
    try:
        write_atomically(path, text)
    except OSError as error:
        return f"its dump could not be written: {error.strerror}"
    return ""
