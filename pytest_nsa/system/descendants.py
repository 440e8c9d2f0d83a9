"""Processes that this one has started, and theirs: found in /proc, identified by number and start time, and ended."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

# Bound at import: a test may replace the functions of os and time.
from os import listdir
from pathlib import Path
from time import CLOCK_BOOTTIME, CLOCK_MONOTONIC, clock_gettime

from pytest_nsa.system.commands import command_line
from pytest_nsa.system.procfs import io_of, stat_of, status_of

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
        io = io_of(Path(f"/proc/{self.pid}"))
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
    fields = stat_of(pid)
    if len(fields) <= _BEGAN:
        return None
    cpu = int(fields[_USER]) + int(fields[_SYSTEM])
    return Process(pid, int(fields[_PARENT]), fields[_STATE], int(fields[_BEGAN]), cpu, status_of(fields))


@dataclass
class Started:
    """The processes that tests have started, and theirs.

    ``mark``: the variable, as NAME=VALUE, that they inherit. ``given``: by pid, the owners of children that
    were seen to start since the last look.
    """

    mark: str
    given: dict[int, str] = field(default_factory=dict)
    owners: dict[Key, str] = field(default_factory=dict)

    def look(self, owner: str, since: int, before: Collection[int] = ()) -> list[Process]:
        """Return the existing ones, in the order of their pids. A new one belongs to its parent's owner; or, if its parent
        has none or is a helper, such as the fork server, to the owner that is given for it, or to ``owner``.

        Children of this process that began before ``since`` and were never seen are not from tests; nor are those in ``before``
        that began in the same tick.
        """
        given, self.given = self.given, {}
        table = _processes()
        given |= self.given
        mine = {p.pid: self.owners[p.key] for p in table.values() if p.key in self.owners}
        new = [p for p in table.values() if p.pid not in mine and p.began + (p.pid not in before) > since]
        mine |= {p.pid: given.get(p.pid, owner) for p in new if p.parent == os.getpid()}
        mine |= {p.pid: owner for p in new if p.parent in mine and table[p.parent].is_helper}
        _add_children(mine, table)
        lost = {p.pid: owner for p in new if p.pid not in mine and self._is_lost(p)}
        if lost:
            mine |= lost
            _add_children(mine, table)
        mine.pop(os.getpid(), None)
        self.owners = {table[pid].key: of for pid, of in mine.items()}
        return [table[pid] for pid in sorted(mine)]

    def _is_lost(self, process: Process) -> bool:
        """Return whether a process is known only by the variable that it inherited, because its parent has ended."""
        with contextlib.suppress(OSError):
            if Path(f"/proc/{process.pid}").stat().st_uid != os.getuid():
                return False  # another user may have set the variable
            return self.mark.encode() in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
        return False


def _add_children(owners: dict[int, str], table: dict[int, Process]) -> None:
    """Add the children of processes, and theirs, to their parents' owners."""
    grew = True
    while grew:
        more = {p.pid: owners[p.parent] for p in table.values() if p.parent in owners and p.pid not in owners}
        grew = bool(more)
        owners |= more


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


def wait_for_ends(processes: Iterable[Process], limit: float) -> None:
    """Wait until processes have ended, for ``limit`` seconds at most."""
    with _handles(processes) as handles:
        _wait(handles, limit)


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
