"""File locks of processes, from /proc/locks and /proc/PID/fd: who holds one, and who waits for one."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_nsa.system.leases import folder_of_leases
from pytest_nsa.system.procfs import read_proc_text

MOST = 8  # locks of a rank that are recorded


def file_locks(pids: Mapping[int, int]) -> dict[int, dict[str, Any]]:
    """Return, per rank of ``pids`` (rank -> pid), the file of the lock that it waits for (``waits_for_lock``) and the ranks that
    hold it (``held_by``); and a file that it has open while another rank holds a lock on it (``open_and_locked``, ``locked_by``):
    the rank may poll for that lock. ``holds_locks`` are the files on which the rank itself holds a lock that is not shared: a rank
    that polls may close its file between two attempts. Two shared locks do not exclude each other. Ranks with none of these are
    skipped.
    """
    held: dict[str, list[tuple[int, bool]]] = {}  # by file: (pid, whether its lock is shared)
    waited: dict[str, list[int]] = {}
    for line in read_proc_text(Path("/proc/locks")).splitlines():
        fields = line.replace("-> ", "").split()
        if len(fields) >= 6 and fields[4].lstrip("-").isdigit():
            pid, inode = int(fields[4]), fields[5]
            if "->" in line:
                waited.setdefault(inode, []).append(pid)
            else:
                held.setdefault(inode, []).append((pid, fields[3] == "READ"))
    ranks = {pid: rank for rank, pid in pids.items()}
    holding = ([pid for pid, _ in holders] for holders in held.values())
    if not any(pid in ranks for several in (*holding, *waited.values()) for pid in several):
        return {}  # saves a look at the open files of many ranks
    found: dict[int, dict[str, Any]] = {}
    leases = folder_of_leases()  # ranks lock the GPUs and cores that they use
    for pid, rank in ranks.items():
        wanted = next((inode for inode, waiters in waited.items() if pid in waiters), "")
        paths, facts = _open_files(pid), dict[str, Any]()
        others = {
            i: sorted({ranks[h] for h in _excluding(pid, holders) if h in ranks})
            for i, holders in held.items()
            if i in paths
        }
        polled = next((i for i, holders in others.items() if holders), "")
        if polled:
            facts["open_and_locked"], facts["locked_by"] = paths[polled], others[polled]
        if wanted:
            facts["waits_for_lock"] = paths.get(wanted, "a file")
            facts["held_by"] = sorted({ranks[p] for p, _ in held.get(wanted, ()) if p in ranks})
        own = [paths[i] for i, holders in held.items() if i in paths and (pid, False) in holders]
        own = sorted({path for path in own if not path.startswith(f"{leases}/")})[:MOST]
        if own:
            facts["holds_locks"] = own
        if facts:
            found[rank] = facts
    return found


def _excluding(pid: int, holders: Sequence[tuple[int, bool]]) -> set[int]:
    """Return the other processes with a lock on a file that excludes ``pid``: no shared lock does where it has only such."""
    has_shared = {shared for holder, shared in holders if holder == pid} == {True}
    return {holder for holder, shared in holders if holder != pid and not (shared and has_shared)}


def _open_files(pid: int) -> dict[str, str]:
    """Return the paths of a process's open files by device and inode, as /proc/locks writes them."""
    found = {}
    try:
        descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return {}
    for descriptor in descriptors:
        try:
            status = descriptor.stat()
            path = os.readlink(descriptor)
        except OSError:
            continue
        found[f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"] = path
    return found
