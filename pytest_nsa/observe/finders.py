"""Where jobs are: the folder that a process maps, the folders in a session's folder, the ranks of a launcher by their variables."""

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from pytest_nsa.evidence.board import BoardSnapshot
from pytest_nsa.system.procfs import began, list_children, read_proc_text, read_stat

_BOARD = re.compile(r"(/\S.*)/rank(\d+)/board\.bin$")
_SAME_JOB = (
    "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE",
)  # fmt: skip
_RANK_NAMES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")  # the first of the innermost launcher


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
    """Return, by rank, the process ids on this machine of the job of a rank or a launcher; {} for any other process.

    A rank's number is in a launcher's variable. Without one, processes with torch that a process with torch has started are
    numbered in the order of their start.
    """
    near = [pid, *_list_descendants(pid)]
    for name in _RANK_NAMES:
        variables = next((v for p in near if (v := read_variables(p)).get(name, "").isdecimal()), None)
        found = _find_by_variable(name, variables) if variables is not None else {}
        if found and (name == "RANK" or len(found) > 1):
            return found
    fields = read_stat(pid)
    for parent in [pid, *map(int, fields[1:2])]:
        children = [p for p in list_children(parent) if _has_torch(p)] if _has_torch(parent) else []
        if len(children) > 1 and pid in (parent, *children):
            return dict(enumerate(sorted(children, key=lambda p: (began(p), p))))
    return {}


def _find_by_variable(name: str, mine: Mapping[str, str]) -> dict[int, int]:
    """Return the ranks of a job by the variable ``name``, which a rank's parents (a shell) and children may have, too.

    The rank is the first process with torch in that line, or the first.
    """
    ranks: dict[int, dict[int, int]] = {}
    for other in (int(path.name) for path in Path("/proc").glob("[0-9]*")):
        variables = read_variables(other)
        rank = variables.get(name, "")
        if rank.isdecimal() and all(variables.get(same) == mine.get(same) for same in _SAME_JOB):
            fields = read_stat(other)
            ranks.setdefault(int(rank), {})[other] = int(fields[1]) if fields else 0
    return {rank: _choose_first(found) for rank, found in sorted(ranks.items())}


def _choose_first(parents: Mapping[int, int]) -> int:
    with_torch = {p: parent for p, parent in parents.items() if _has_torch(p)} or parents
    return next((p for p, parent in sorted(with_torch.items()) if parent not in with_torch), min(with_torch))


def _list_descendants(pid: int, levels: int = 4) -> list[int]:
    children = list_children(pid) if levels else []
    return children + [p for child in children for p in _list_descendants(child, levels - 1)]


def _has_torch(pid: int) -> bool:
    return "/libtorch" in read_proc_text(Path(f"/proc/{pid}/maps"))


def read_variables(pid: int) -> dict[str, str]:
    """Return the variables that a process of this user was started with; {} for another user's process, or one that has ended."""
    path = Path(f"/proc/{pid}/environ")
    try:
        data = path.read_bytes() if path.stat().st_uid == os.getuid() else b""
    except OSError:
        return {}
    pairs = (entry.decode(errors="replace").partition("=") for entry in data.split(b"\0") if b"=" in entry)
    return {name: value for name, _, value in pairs}
