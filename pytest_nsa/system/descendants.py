"""Processes that this one, or a rank, has started, and theirs: found in /proc, identified by number and start time, and ended."""

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from os import listdir
from pathlib import Path
from time import CLOCK_BOOTTIME, CLOCK_MONOTONIC, clock_gettime

from pytest_nsa.system.clock import monotonic
from pytest_nsa.system.procfs import command_line, is_alive, list_children, read_io, read_stat, read_status

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
                _kill_and_reap(pid)
                return
            time.sleep(0.002)


def end_orphans(known: Collection[int]) -> None:
    """SIGKILL and reap every child that is not in ``known``: this process adopted it when the rank that started it died."""
    for _ in range(_MAX_ROUNDS):
        orphans = [pid for pid in children() if pid not in known]
        if not orphans:
            return
        for pid in orphans:
            _kill_and_reap(pid)


def kill_dead_ranks_groups(leaders: Collection[int], since: float) -> None:
    """SIGKILL the processes that dead ranks left, after the zygote, which usually does it, has been killed.

    ``leaders`` are the ranks' pids, each of which led a process group. The kernel gives no new process the number of a
    group that still has members; if a process has such a pid, the group belongs to it and is not touched. Nor are processes
    that began before ``since`` (seconds since boot), when the launcher was started.
    """
    deadline = monotonic() + _LAST_BREATH_S
    while any(map(is_alive, leaders)) and monotonic() < deadline:
        time.sleep(0.01)  # the kernel ends them with the zygote; this process may learn of the zygote's end first
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = read_stat(path.name)
            group, began = int(fields[2]), int(fields[19]) / os.sysconf("SC_CLK_TCK")
            is_ours = group in leaders and not is_alive(group) and began >= since
            if is_ours and path.stat().st_uid == os.getuid():
                os.kill(int(path.name), signal.SIGKILL)


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
            _kill_and_reap(pid)
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


def _kill_and_reap(pid: int) -> None:
    """SIGKILL and reap a child; until it is reaped, no other process has its pid."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
