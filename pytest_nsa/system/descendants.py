"""Processes that this one has started, and theirs: found in /proc, identified by number and start time, and ended."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

# Bound at import: a test may replace the functions of os and time.
from os import listdir
from pathlib import Path
from time import CLOCK_BOOTTIME, CLOCK_MONOTONIC, clock_gettime

from pytest_nsa.system.procfs import command_line, read_io, read_stat, read_status

TICKS = os.sysconf("SC_CLK_TCK")
MOST = 1000  # characters of a command, by which a helper is recognised
GONE_S = 2.0  # for killed processes to end, so that their ports are free
# Servers of multiprocessing and loky, and compilers, which serve the whole session.
_FORK_SERVER = "multiprocessing.forkserver"
_HELPERS = (_FORK_SERVER, "resource_tracker", "torch/_inductor/compile_worker")
_STATE, _PARENT, _USER, _SYSTEM, _BEGAN = 0, 1, 11, 12, 19  # fields of /proc/PID/stat after the command's name

Key = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Process:
    """A process as /proc showed it.

    ``began``: in clock ticks since boot. ``cpu``: in clock ticks. ``status``: the wait status, if it has ended and is not reaped.
    """

    pid: int
    parent: int
    state: str
    began: int
    cpu: int
    status: int

    @property
    def key(self) -> Key:
        """Pid and start time: the kernel reuses pids."""
        return self.pid, self.began

    @property
    def has_ended(self) -> bool:
        """Whether it has ended."""
        return self.state in ("Z", "X")

    @property
    def moved(self) -> int:
        """The bytes that it has read and written so far; 0 where that cannot be read."""
        io = read_io(Path(f"/proc/{self.pid}"))
        return io.get("rchar", 0) + io.get("wchar", 0)

    @property
    def command(self) -> str:
        """The command line, with secrets masked; '' for a process that has ended."""
        return command_line(self.pid, MOST)

    @property
    def is_helper(self) -> bool:
        """Whether it serves the whole session. A process that the fork server has made does not."""
        command = self.command
        is_forked = _FORK_SERVER in command and _FORK_SERVER in command_line(self.parent, MOST)
        return any(part in command for part in _HELPERS) and not is_forked


def ticks_since_boot() -> int:
    """Return the time since boot, as `Process.began` counts it."""
    return int(clock_gettime(CLOCK_BOOTTIME) * TICKS)


def _processes() -> dict[int, Process]:
    found = {}
    for name in listdir("/proc"):
        if name.isdecimal() and (process := _read(int(name))) is not None:
            found[process.pid] = process
    return found


def _read(pid: int) -> Process | None:
    fields = read_stat(pid)
    if len(fields) <= _BEGAN:
        return None
    cpu = int(fields[_USER]) + int(fields[_SYSTEM])
    return Process(pid, int(fields[_PARENT]), fields[_STATE], int(fields[_BEGAN]), cpu, read_status(fields))


def started_since(since: int, before: Collection[int], mark: str) -> list[Process]:
    """Return the processes that descend from this one and began after ``since`` (ticks since boot), in the order of their pids.

    Those in ``before`` that began in the same tick do not count. ``mark``: a variable, as NAME=VALUE, that they inherit; it shows
    those that have lost their parent.
    """
    table = _processes()
    new = [p for p in table.values() if p.began + (p.pid not in before) > since and p.pid != os.getpid()]
    found = {p.pid for p in new if os.getpid() in _line(p, table)}
    found |= {p.pid for p in new if p.pid not in found and _inherits(p, mark)}
    found |= {p.pid for p in new if any(pid in found for pid in _line(p, table))}
    return [table[pid] for pid in sorted(found)]


def _line(process: Process, table: dict[int, Process]) -> Iterator[int]:
    """Yield the pids of a process's parent, of its parent, and so on."""
    pid = process.parent
    while pid in table:
        yield pid
        pid = table[pid].parent


def _inherits(process: Process, mark: str) -> bool:
    with contextlib.suppress(OSError):
        if Path(f"/proc/{process.pid}").stat().st_uid != os.getuid():
            return False  # another user may have set the variable
        return mark.encode() in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    return False


def end(processes: Iterable[Process]) -> None:
    """SIGKILL processes, and wait until they have ended. A process that has reused a pid gets no signal.

    The program's handler of SIGCHLD is not called for them: one that raises, as that of torch's data loaders does, would take
    the place of the exception that reports why they are ended.
    """
    with without_child_handler():
        _end(processes)
        if (module := sys.modules.get("multiprocessing.process")) is not None:
            module.active_children()  # reaps them: a later call of the handler finds no worker that was killed


@contextlib.contextmanager
def without_child_handler() -> Iterator[None]:
    """Call no handler of SIGCHLD for children that end in the block; no-op outside of the main thread."""
    handler = signal.getsignal(signal.SIGCHLD)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler)


def _end(processes: Iterable[Process]) -> None:
    with _handles(processes) as handles:
        for handle in handles:
            with contextlib.suppress(OSError):  # it has ended, or is no longer ours to end
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        _wait(handles, GONE_S)


@contextlib.contextmanager
def _handles(processes: Iterable[Process]) -> Iterator[list[int]]:
    """Yield the pidfds of those that still exist."""
    found: list[int] = []
    try:
        for process in processes:
            with contextlib.suppress(OSError):
                found.append(os.pidfd_open(process.pid))
                now = _read(process.pid)
                if now is None or now.key != process.key or process.pid == os.getpid():
                    os.close(found.pop())
        yield found
    finally:
        for handle in found:
            os.close(handle)


def _wait(handles: Sequence[int], limit: float) -> None:
    # Not by /proc: a process is a zombie there once its main thread has ended, and its parent can reap it after its last one.
    poll, waiting, deadline = select.poll(), len(handles), clock_gettime(CLOCK_MONOTONIC) + limit
    for handle in handles:
        poll.register(handle, select.POLLIN)
    while waiting and (left := deadline - clock_gettime(CLOCK_MONOTONIC)) > 0:
        for handle, _ in poll.poll(1e3 * left):
            poll.unregister(handle)
            waiting -= 1
