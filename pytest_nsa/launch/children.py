"""What a rank leaves running: found, told and ended. Orphans come to the rank itself, or to the zygote when it has died."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Collection
from pathlib import Path

_MAX_ROUNDS = 100


def children() -> list[int]:
    """Process ids of this process's children; [] where the kernel does not list them."""
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found += [int(pid) for pid in (task / "children").read_text().split()]
    return found


def end_orphans(known: Collection[int]) -> None:
    """SIGKILL and reap every child that is not in ``known``: the kernel made it ours when the rank that started it died."""
    for _ in range(_MAX_ROUNDS):
        orphans = [pid for pid in children() if pid not in known]
        if not orphans:
            return
        for pid in orphans:
            _end(pid)


def end_leftovers() -> list[str]:
    """In a rank whose test is over: end its children and theirs; returns the command lines of those nobody else looks after.

    Daemonic children of multiprocessing and its servers (data loaders have them) end with their parent by design.
    """
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # there is none
        return []
    left = children()
    expected = _expected()
    told = []
    for _ in range(_MAX_ROUNDS):
        for pid in left:
            state, command = _describe(pid)
            if state != "Z" and pid not in expected:
                told.append(command)
            _end(pid)
        left = children()
        if not left:
            break
    return told


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
    """State letter and command line of a child."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "Z", ""
    return state, (command or "?")[:200]


def _end(pid: int) -> None:
    """A child of ours: its pid is its own until we reap it."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
