"""The second look, taken only at a stall: first /proc, which disturbs no rank, last the stack dump, and py-spy's native frames."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from time import CLOCK_MONOTONIC, clock_gettime, sleep
from typing import Any

from pytest_nsa.evidence.stacks import CHILD_MARK
from pytest_nsa.observe.host_log import note
from pytest_nsa.system.disk_space import ignore_full_disk
from pytest_nsa.system.procfs import catches, difference, is_runnable, list_children, look_at
from pytest_nsa.system.sockets import socket_queues
from pytest_nsa.wire.files import append, read_text, touch, write_atomically
from pytest_nsa.wire.messages import DUMP_SIGNAL


def find_py_spy() -> str | None:
    """Return the path of py-spy: from PATH, or in the folder of this interpreter (its environment need not be activated)."""
    return shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))


def dump_by_py_spy(pid: int, *options: str, limit_s: float) -> tuple[str, str]:
    """Return (output of ``py-spy dump``, '') for a process of this user, which it pauses for a moment; or ('', reason)."""
    tool = find_py_spy()
    if tool is None:
        return "", "py-spy is not installed"
    try:
        done = subprocess.run(
            [tool, "dump", *options, "--pid", str(pid)], text=True, capture_output=True, timeout=limit_s, check=False
        )
    except (subprocess.TimeoutExpired, OSError) as error:
        return "", f"py-spy gave nothing: {type(error).__name__}"
    if done.returncode or not done.stdout:
        output = "; ".join(done.stderr.strip().splitlines())[:200]
        return "", f"py-spy could not look: {output or 'no reason given'}"
    return done.stdout, ""


LIMIT_S = 8.0  # symbols of a large library take seconds
MOST_RANKS = 4  # a dump takes about two seconds


def dump_where_useful(
    files: Mapping[int, Path], pids: Mapping[int, int], blocked: Collection[int]
) -> Iterator[tuple[int, str]]:
    """Write native frames of at most `MOST_RANKS` ranks (rank -> its native.txt), those that want the CPU first; yield each rank
    with '' or the reason for the missing dump.

    A rank in ``blocked`` waits in a call that its board names: its native frames would show only the transport.
    """
    free = [rank for rank, pid in pids.items() if pid and rank not in blocked]
    chosen = sorted(free, key=lambda rank: not is_runnable(pids[rank]))[:MOST_RANKS]
    for rank, pid in pids.items():
        if rank in chosen:
            yield rank, dump_native(pid, files[rank])
        elif not pid:
            yield rank, "it runs on another node"
        else:
            yield rank, "it waits in a collective" if rank in blocked else f"{MOST_RANKS} other ranks were looked at"


def dump_native(pid: int, path: Path) -> str:
    """Write py-spy's dump of a process of this user to ``path``; returns '' or the reason for its absence."""
    text, why_not = dump_by_py_spy(pid, "--native", limit_s=LIMIT_S)
    if not text:
        return why_not
    try:
        write_atomically(path, text)
    except OSError as error:
        return f"its dump could not be written: {error.strerror}"
    return ""


SAMPLE_S = 0.4
COUNTERS_REQUEST = "counters.asked"  # nsa/trace/stall/counters.py looks for it, and deletes it with its answer
ANSWER_S = 0.5  # for an answer; a rank that holds the GIL gives none
DUMP_REQUEST = "dump.asked"  # nsa/trace/stall/heartbeat.py looks for it
BEAT_S = 0.06  # within which a heartbeat finds the request
DUMP_WAIT_S = 2.0
STARVED_WAIT_S = 8.0  # the same for a rank that wants the CPU: on a busy machine its handler may run late
SURELY_WHOLE = 10  # how many looks a dump has not grown in, to be complete
MAX_CHILDREN = 4


def sample_processes(pids: Mapping[int, int], evidence: Path, more: Mapping[int, dict[str, Any]]) -> None:
    """Look twice at each rank (rank -> pid), ``SAMPLE_S`` between; append a line per rank to ``evidence``, with ``more``."""
    first = {rank: look_at(pid) for rank, pid in pids.items()}
    started = clock_gettime(CLOCK_MONOTONIC)
    sleep(SAMPLE_S)
    elapsed = clock_gettime(CLOCK_MONOTONIC) - started
    for rank, pid in pids.items():
        before, after = first[rank], look_at(pid)
        if before is not None and after is not None:
            facts = {**difference(before, after, elapsed), **more.get(rank, {}), **socket_queues(pid)}
            note(evidence, "process", rank=rank, **facts)


def request_counters(folders: Iterable[Path]) -> None:
    """Request the counters of the loops that ranks are in from their heartbeats, by a file in each folder."""
    _leave_files(folders, COUNTERS_REQUEST)


def await_counters(folders: Iterable[Path]) -> None:
    """Request the counters, and wait until the heartbeats of all these ranks have answered, `ANSWER_S` at most."""
    waiting = list(folders)
    request_counters(waiting)
    began = clock_gettime(CLOCK_MONOTONIC)
    while (waiting := [f for f in waiting if (f / COUNTERS_REQUEST).exists()]) and clock_gettime(
        CLOCK_MONOTONIC
    ) - began < ANSWER_S:
        sleep(0.02)


def pause_heartbeats(folders: Iterable[Path]) -> None:
    """Pause the heartbeats of ranks while their stacks are dumped; wait as long as a beat takes."""
    _leave_files(folders, DUMP_REQUEST)
    sleep(BEAT_S)


def _leave_files(folders: Iterable[Path], name: str) -> None:
    for folder in folders:
        with ignore_full_disk(), contextlib.suppress(FileNotFoundError):  # a rank that never began
            touch(folder / name)


def dump_stacks(
    ranks: Mapping[int, Path], send: Callable[[int], None], wants_to: Callable[[int], bool] = lambda rank: False
) -> None:
    """Request a dump from each rank (rank -> its stacks.txt) by ``send(rank)``, and wait until the dumps are complete.

    ``wants_to(rank)`` returns whether the rank's process `wants_to_dump`: it is waited for longer than one that is stopped or
    inside a system call that no signal interrupts.
    """
    sizes = {rank: _size(path) for rank, path in ranks.items()}
    for rank in ranks:
        send(rank)
    began = clock_gettime(CLOCK_MONOTONIC)
    waiting = dict.fromkeys(ranks, (-1, 0))  # the size at the last look, and how often it was that before
    while waiting and (waited := clock_gettime(CLOCK_MONOTONIC) - began) < STARVED_WAIT_S:
        if waited > DUMP_WAIT_S and not any(map(wants_to, waiting)):
            return
        sleep(0.02)
        for rank, (last, times) in list(waiting.items()):
            size = _size(ranks[rank])
            times = times + 1 if size > sizes[rank] and size == last else 0
            # On a busy machine a rank may pause in the middle of its dump.
            if times >= (1 if times and _ends_with_current_thread(ranks[rank]) else SURELY_WHOLE):
                del waiting[rank]
            else:
                waiting[rank] = (size, times)


def wants_to_dump(pid: int) -> bool:
    """Return whether a process wants the CPU and has a handler for dumps, which runs as soon as it gets some."""
    return is_runnable(pid) and catches(pid, DUMP_SIGNAL)


def dump_children(pids: Mapping[int, int], files: Mapping[int, Path]) -> None:
    """Request a dump from the ranks' children (data loaders' workers), into the rank's file after a line ``# process PID``.

    Only those that inherited the rank's handler get the signal: it would end any other process.
    """
    for rank, pid in pids.items():
        for child in list_children(pid)[:MAX_CHILDREN]:
            if not catches(child, DUMP_SIGNAL):
                continue
            with ignore_full_disk():
                append(files[rank], f"{CHILD_MARK}{child}\n".encode())
            with contextlib.suppress(ProcessLookupError):
                dump_stacks({rank: files[rank]}, lambda _, child=child: os.kill(child, DUMP_SIGNAL))  # type: ignore[misc]


def _ends_with_current_thread(path: Path) -> bool:
    """Return whether a dump ends with the thread that got the signal: in general the main thread, which is written last."""
    last = read_text(path).rpartition("\n\n")[2]
    return last.startswith("Current thread") and last.count("\n") > 2


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
