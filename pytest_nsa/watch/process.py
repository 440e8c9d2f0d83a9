"""What /proc says of a process: reading it disturbs nobody. What a sandboxed kernel does not show stays empty."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

REST_S = 0.02
REST_LOOKS = 10


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


def restless_threads() -> list[str]:
    """Names of this process's other threads that do not rest: no moment is found in which none of them runs.

    A thread that rests in a system call holds no lock that a forked child would wait for in vain; one that runs may.
    """
    names = {t.native_id: t.name for t in threading.enumerate()}
    now = _thread_activity()
    restless = list(now)
    for _ in range(REST_LOOKS):
        if not restless:
            break
        time.sleep(REST_S)
        before, now = now, _thread_activity()
        restless = [thread for thread in now if now[thread] != before.get(thread)]
    return [names.get(thread, f"native thread {thread}") for thread in restless]


def _thread_activity() -> dict[int, tuple[str, ...]]:
    """Of each thread but the main one: state and context switches. Where /proc hides these, no two looks are alike."""
    found = {}
    for task in Path("/proc/self/task").glob("*"):
        if task.name == str(os.getpid()):
            continue
        status = dict(line.partition(":")[::2] for line in _read(task / "status").splitlines())
        switches = (status.get("voluntary_ctxt_switches"), status.get("nonvoluntary_ctxt_switches"))
        state = status.get("State", "?").strip()[:1]
        resting = state in "SI" and None not in switches
        found[int(task.name)] = (state, *map(str, switches)) if resting else (str(time.monotonic()),)
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
