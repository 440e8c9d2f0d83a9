"""Process facts and duties on Linux that need no torch: dying with the parent, CPU state, children, threads."""

from __future__ import annotations

import ctypes
import os
import signal
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that forked it ends; at once if ``parent`` has gone already."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def signal_name(number: int) -> str:
    """'SIGKILL' for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessState:
    """A look at a process: the main thread's state letter and wait channel, CPU seconds, switches, children, threads."""

    state: str
    cpu_s: float
    voluntary_switches: int
    wchan: str
    children: tuple[str, ...]
    threads: int


def look_at(pid: int) -> ProcessState | None:
    """Read /proc for ``pid``; None when it has gone. What a sandboxed kernel does not show stays empty."""
    proc = Path("/proc") / str(pid)
    try:
        fields = (proc / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    cpu = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    status = _read(proc / "status")
    switches = next((line.split()[1] for line in status.splitlines() if line.startswith("voluntary_ctxt")), "0")
    children = _read(proc / "task" / str(pid) / "children").split()
    commands = tuple(_read(Path("/proc") / child / "cmdline").replace("\0", " ").strip()[:200] for child in children)
    return ProcessState(
        state=fields[0],
        cpu_s=cpu,
        voluntary_switches=int(switches),
        wchan=_read(proc / "wchan").strip(),
        children=commands,
        threads=int(fields[17]),
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def native_threads() -> list[tuple[int, str]]:
    """(thread id, state) of this process's threads other than the calling one."""
    own = Path("/proc/self/task")
    try:
        ids = [int(p.name) for p in own.iterdir()]
    except OSError:
        return []
    me = os.getpid()
    found = []
    for tid in ids:
        if tid != me:
            stat = _read(own / str(tid) / "stat").rpartition(")")[2].split()
            found.append((tid, stat[0] if stat else "?"))
    return found
