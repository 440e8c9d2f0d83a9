"""What /proc says of a process: reading it disturbs nobody. What a sandboxed kernel does not show stays empty."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


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
    """Read /proc for ``pid``; None when it has gone."""
    proc = Path("/proc") / str(pid)
    try:
        fields = (proc / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    cpu = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    switches = next(
        (line.split()[1] for line in _read(proc / "status").splitlines() if line.startswith("voluntary_ctxt")), "0"
    )
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


def native_threads() -> list[str]:
    """The state letters of this process's threads other than the main one."""
    states = []
    for task in Path("/proc/self/task").glob("*"):
        if task.name != str(os.getpid()):
            fields = _read(task / "stat").rpartition(")")[2].split()
            states.append(fields[0] if fields else "?")
    return states


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
