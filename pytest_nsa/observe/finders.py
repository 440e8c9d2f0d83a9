"""Where jobs are: the folder that a process maps, the folders in a session's folder, the ranks of a launcher by their variables."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from pytest_nsa.evidence.board import BoardSnapshot
from pytest_nsa.system.procfs import read_proc_text, read_stat

_BOARD = re.compile(r"(/\S.*)/rank(\d+)/board\.bin$")
_SAME_JOB = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")


def find_folder(pid: int, rank: int | None = None) -> Path | None:
    """Return the folder of the board of a rank (None: of any) that a process has mapped; None if it maps no board, or is another
    user's.
    """
    lines = read_proc_text(Path(f"/proc/{pid}/maps")).splitlines()
    found = (match for line in lines if (match := _BOARD.search(line)))
    return next((Path(match[1]) for match in found if rank is None or int(match[2]) == rank), None)


def living_ranks(folder: Path, boards: Mapping[int, BoardSnapshot]) -> dict[int, int]:
    """Return the pids, by rank, of ranks that are not done and that live on this machine: each maps its board still.

    A pid alone may be another process's: the kernel reuses pids.
    """
    found = {}
    for rank, board in boards.items():
        mapped = find_folder(board.pid, rank) if board.phase != "done" else None
        with contextlib.suppress(OSError):  # a file that has gone
            if mapped is not None and (mapped / f"rank{rank}").samefile(folder / f"rank{rank}"):
                found[rank] = board.pid
    return found


def list_jobs(base: Path) -> list[Path]:
    """Return the folders of jobs that tests have started, also those of a pytest that a test runs."""
    # os.walk passes over what is deleted while it looks: such a pytest deletes its own jobs.
    return sorted(Path(at, name) for at, names, _ in os.walk(base) for name in names if name.startswith("job-"))


def launched_ranks(pid: int) -> dict[int, int]:
    """Return, by rank, the process ids on this machine of the job that a process belongs to by its launcher's variables; {} without
    such variables.

    A rank's children (a data loader's workers) inherit its variables: the rank is the process with a parent that lacks them.
    """
    mine = _variables(pid)
    if not mine.get("RANK", "").isdecimal():
        return {}
    ranks: dict[int, dict[int, int]] = {}
    for other in (int(path.name) for path in Path("/proc").glob("[0-9]*")):
        variables = _variables(other)
        rank = variables.get("RANK", "")
        if rank.isdecimal() and all(variables.get(name) == mine.get(name) for name in _SAME_JOB):
            fields = read_stat(other)
            ranks.setdefault(int(rank), {})[other] = int(fields[1]) if fields else 0
    return {
        rank: next((p for p, parent in sorted(found.items()) if parent not in found), min(found))
        for rank, found in sorted(ranks.items())
    }


def _variables(pid: int) -> dict[str, str]:
    """Return the variables that a process of this user was started with; {} for another user's process, or one that has ended."""
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.decode(errors="replace").partition("=") for entry in data.split(b"\0") if b"=" in entry)
    return {name: value for name, _, value in pairs}
