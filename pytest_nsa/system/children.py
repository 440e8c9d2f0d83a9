"""Find, report and end the processes that a rank leaves. The rank adopts orphans; the zygote does if the rank has died."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path

from pytest_nsa.system.clock import monotonic
from pytest_nsa.system.procfs import command_line, list_children, read_stat

_MAX_ROUNDS = 100
_LAST_BREATH_S = 2.0


def children() -> list[int]:
    """Return the process ids of this process's children; [] where the kernel does not list them."""
    return list_children(os.getpid())


def reap(pid: int, seconds: float) -> None:
    """Wait until a child has ended, and reap it; SIGKILL it after ``seconds``."""
    deadline = monotonic() + seconds
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if monotonic() >= deadline:
                _end(pid)
                return
            time.sleep(0.002)


def end_orphans(known: Collection[int]) -> None:
    """SIGKILL and reap every child that is not in ``known``: this process adopted it when the rank that started it died."""
    for _ in range(_MAX_ROUNDS):
        orphans = [pid for pid in children() if pid not in known]
        if not orphans:
            return
        for pid in orphans:
            _end(pid)


def kill_dead_ranks_groups(leaders: Collection[int], since: float) -> None:
    """SIGKILL the processes that dead ranks left, after the zygote, which usually does it, has been killed.

    ``leaders`` are the ranks' pids, each of which led a process group. The kernel gives no new process the number of a
    group that still has members; if a process has such a pid, the group belongs to it and is not touched. Nor are processes
    that began before ``since`` (seconds since boot), when the launcher was started.
    """
    deadline = monotonic() + _LAST_BREATH_S
    while any(map(_is_alive, leaders)) and monotonic() < deadline:
        time.sleep(0.01)  # the kernel ends them with the zygote; this process may learn of the zygote's end first
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = read_stat(path.name)
            group, began = int(fields[2]), int(fields[19]) / os.sysconf("SC_CLK_TCK")
            is_ours = group in leaders and not _is_alive(group) and began >= since
            if is_ours and path.stat().st_uid == os.getuid():
                os.kill(int(path.name), signal.SIGKILL)


def _is_alive(pid: int) -> bool:
    return read_stat(pid)[:1] not in ([], ["Z"], ["X"])


def end_leftovers() -> list[str]:
    """In a rank, after its test: end its children and theirs; return the command lines of those that should not have been left.

    Daemonic children of multiprocessing and its servers (data loaders have them) are not returned: they end with their parent.
    """
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # no child exists
        return []
    left = children()
    expected = _expected()
    killed = []
    for _ in range(_MAX_ROUNDS):
        for pid in left:
            state, command = _describe(pid)
            if state != "Z" and pid not in expected:
                killed.append(command)
            _end(pid)
        left = children()
        if not left:
            break
    return killed


def _expected() -> set[int]:
    found: set[int] = set()
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        found |= {p.pid for p in process.active_children() if p.daemon and p.pid is not None}
    tracker = sys.modules.get("multiprocessing.resource_tracker")
    server = sys.modules.get("multiprocessing.forkserver")
    found.add(getattr(getattr(tracker, "_resource_tracker", None), "_pid", None) or 0)
    found.add(getattr(getattr(server, "_forkserver", None), "_forkserver_pid", None) or 0)
    return found


def _describe(pid: int) -> tuple[str, str]:
    """Return the state letter and the command line of a child."""
    fields = read_stat(pid)
    return (fields[0], command_line(pid) or "?") if fields else ("Z", "")


def _end(pid: int) -> None:
    """SIGKILL and reap a child; until it is reaped, no other process has its pid."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
