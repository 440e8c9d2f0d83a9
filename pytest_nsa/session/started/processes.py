"""Processes that tests start: give them variables, show the lines that they are at, end ranks once a test that its time limit or an
interrupt has ended had time to do so, and find what keeps a session from ending.

``os.environ`` of this process never has the variables: a test may compare it, and its threads may copy it at any moment.
"""

import contextlib
import faulthandler
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from pytest_nsa.evidence.stacks import Frame, ThreadStack, parse_dump
from pytest_nsa.observe.observer import Observer
from pytest_nsa.observe.second_look import dump_stacks
from pytest_nsa.report.plain import visible
from pytest_nsa.report.terminal import short_place
from pytest_nsa.system.clock import monotonic
from pytest_nsa.system.descendants import MOST, TICKS, Key, Process, end
from pytest_nsa.system.procfs import catches, command_line, how_it_ended
from pytest_nsa.wire.files import open_to_append

FILE, SIGNAL = "stacks.txt", getattr(signal, "SIGRTMIN", 34) + 6  # as nsa.trace.job_folders has them
MOST_THREADS = 3
COMMAND = 100  # characters
_KINDS = {
    "from multiprocessing.spawn import": "a child by multiprocessing's spawn",
    "from multiprocessing.forkserver import": "a child by multiprocessing's fork server",
}


class ChildStacks:
    """Registers faulthandler in this process, so that forks inherit it. Each dump is appended to a file in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / FILE
        self._fd = open_to_append(self._file)
        faulthandler.register(SIGNAL, file=self._fd, all_threads=True, chain=False)

    def close(self) -> None:
        """Undo the registration."""
        faulthandler.unregister(SIGNAL)
        os.close(self._fd)

    def places(self, pid: int) -> list[str]:
        """Return the line of each thread that runs the user's code, the main thread's first; [] where the process shows none."""
        if not catches(pid, SIGNAL):
            return []  # the signal would end it
        began = self._file.stat().st_size
        with contextlib.suppress(ProcessLookupError):
            dump_stacks({pid: self._file}, lambda of: os.kill(of, SIGNAL))
        with self._file.open("rb") as file:
            file.seek(began)
            threads = parse_dump(file.read().decode(errors="replace"))
        frames = [frame for thread in sorted(threads, key=lambda t: not t.is_main) if (frame := _shown(thread))]
        return list(dict.fromkeys(_place(frame) for frame in frames))[:MOST_THREADS]


def _shown(thread: ThreadStack) -> Frame | None:
    """Return the innermost frame of the user's code; of a main thread without one, the innermost frame."""
    # Below multiprocessing's _bootstrap are the frames of the parent.
    own = itertools.takewhile(
        lambda f: not f.file.endswith("/multiprocessing/process.py") or f.function != "_bootstrap", thread.frames
    )
    user = next((frame for frame in own if frame.is_user), None)
    return user or (thread.frames[0] if thread.is_main else None)


def _place(frame: Frame) -> str:
    if frame.is_user:
        return short_place(frame.describe())
    return f"{'/'.join(frame.file.split('/')[-2:])}:{frame.line} in {frame.function}"


def named(process: Process, places: Sequence[str] = ()) -> str:
    """Return a process in one line: its number, state and command, and the ``places`` that it is at."""
    if process.has_ended:
        return f"pid {process.pid} has failed ({how_it_ended(process.status)}), and was not waited for"
    command = process.command
    kind = next((kind for part, kind in _KINDS.items() if part in command), "")
    shown = kind or " ".join(visible(command).split())[:COMMAND]
    if command == command_line(os.getpid(), MOST):
        shown = "a fork of this session"
    at = f": at {'; a thread at '.join(places)}" if places else ""
    return f"pid {process.pid} ({process.state}) {shown}{at}"


RANK_VARIABLES = {"RANK", "WORLD_SIZE", "MASTER_ADDR"}  # any of them in env=: the environment is a rank's

_of_forks: dict[str, str] = {}  # what a fork adds to its environment
_this_thread = threading.local()


def on_start(before: Callable[[], bool], variables: Mapping[str, str]) -> Callable[[], None]:
    """Call ``before`` before each start of a process. If it returns true, the process gets ``variables``, unless it is started with
    an environment that is neither a rank's nor made from this process's.

    Return a function that undoes this.
    """
    popen: Any = subprocess.Popen
    process: Any = BaseProcess
    execute, start = popen._execute_child, process.start

    def execute_child(
        self: Any, args: Any, executable: Any, preexec: Any, close: Any, fds: Any, cwd: Any, env: Any, *more: Any
    ) -> Any:
        if not before():
            return execute(self, args, executable, preexec, close, fds, cwd, env, *more)
        ours = os.environ.keys() & env.keys() if env is not None else ()
        if env is not None and (RANK_VARIABLES & set(env) or 2 * len(ours) >= len(os.environ)):
            env = {**variables, **env}
        with _in_environment(variables):
            return execute(self, args, executable, preexec, close, fds, cwd, env, *more)

    def start_process(self: Any) -> Any:
        if not before():
            return start(self)
        with _in_environment(variables):
            return start(self)

    popen._execute_child, process.start = execute_child, start_process

    def undo() -> None:
        popen._execute_child, process.start = execute, start

    return undo


@contextlib.contextmanager
def _in_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Give variables to the processes that start in the block: a new program inherits C's environment, a fork os.environ.

    No-op within another one: a pytest that a test runs in this process has given its own.
    """
    if getattr(_this_thread, "is_within", False):
        yield
        return
    _this_thread.is_within = True
    _of_forks.update(variables)
    for name, value in variables.items():
        os.putenv(name, value)
    try:
        yield
    finally:
        for name in variables:
            if name in os.environ:
                os.putenv(name, os.environ[name])
            else:
                os.unsetenv(name)
        _of_forks.clear()
        _this_thread.is_within = False


os.register_at_fork(after_in_child=lambda: os.environ.update(_of_forks))


IDLE_S = 10.0  # after which idle processes that keep a session from ending are ended
# The same for a worker of xdist, and the most that it waits: its controller kills it after 10 s.
WORKER_WAITS = 4.0, 7.0
BUSY, MOVES = 0.2, 100_000  # of a core, and bytes a second: a process that uses or moves more is at work
CLEANUP_S = 3.0  # for the test, and for each pool, to end their processes


class ProcessEnds:
    """``look`` returns the processes that are to be ended. ``ended`` has the keys of those that were."""

    def __init__(self, look: Callable[[], Sequence[Process]]) -> None:
        self._look = look
        self.ended: set[Key] = set()
        self._timer: threading.Timer | None = None

    def begin(self, is_over: Callable[[], bool]) -> bool:
        """End the processes after `CLEANUP_S` if ``is_over`` then returns true; return whether there are any."""
        found = self._look()
        if found and (self._timer is None or not self._timer.is_alive()):
            self._timer = threading.Timer(CLEANUP_S, lambda: self.end(found) if is_over() else None)
            self._timer.daemon = True
            self._timer.start()
        return bool(found)

    def finish(self) -> None:
        """End the processes now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
            self._timer = None
        self.end(self._look())

    def end(self, processes: Sequence[Process]) -> None:
        """End processes. A pool of multiprocessing ends its workers itself: an idle one that is killed holds a lock for ever, and
        the pool waits for that lock when it is closed, at exit at the latest.
        """
        self.ended |= {process.key for process in processes}
        pids = {process.pid for process in processes}
        for pool in _pools():
            if not pids.isdisjoint(getattr(worker, "pid", None) for worker in pool._pool):
                ends = threading.Thread(target=pool.terminate, daemon=True)
                ends.start()
                ends.join(CLEANUP_S)
        end(processes)


def of_ranks(processes: Sequence[Process], ranks: Collection[int]) -> list[Process]:
    """Return the processes that are ranks (pids), that have started ranks, or that ranks have started."""
    parents = {process.pid: process.parent for process in processes}

    def line(pid: int) -> Iterator[int]:
        while pid in parents:
            yield pid
            pid = parents[pid]

    above = {pid for rank in ranks for pid in line(rank)}
    return [p for p in processes if p.pid in above or any(pid in ranks for pid in line(p.pid))]


def is_interrupted() -> bool:
    """Return whether the main thread handles a KeyboardInterrupt: a test that has caught one goes on."""
    handled: Any = sys._current_exceptions().get(threading.main_thread().ident or 0)
    error = handled[1] if isinstance(handled, tuple) else handled  # three values before Python 3.12
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def _pools() -> list[Any]:
    """Return the pools of multiprocessing that are open."""
    module, registry = sys.modules.get("multiprocessing.pool"), sys.modules.get("multiprocessing.util")
    if module is None or registry is None:
        return []
    finalizers = list(registry._finalizer_registry.values())
    owners = (finalizer._weakref() for finalizer in finalizers if getattr(finalizer, "_weakref", None) is not None)
    return [owner for owner in owners if isinstance(owner, module.Pool)]


def joined_at_exit() -> set[int]:
    """Return the pids of the processes that multiprocessing joins at exit.

    Executors end those of theirs that have no work, and finalizers those of managers, before that.
    """
    module = sys.modules.get("multiprocessing.process")
    started = module.active_children() if module is not None else ()
    executors = sys.modules.get("concurrent.futures.process")
    idle: set[int] = set()
    for manager in list(getattr(executors, "_threads_wakeups", ())):
        if not getattr(manager, "pending_work_items", True):
            idle.update(getattr(manager, "processes", None) or ())
    finalizers = getattr(sys.modules.get("multiprocessing.util"), "_finalizer_registry", {})
    for (priority, _), finalizer in list(finalizers.items()):
        if priority is not None and priority >= 0:  # called before the join
            arguments = getattr(finalizer, "_args", ())
            idle.update(p.pid for p in arguments if isinstance(p, module.BaseProcess))  # type: ignore[union-attr]
    return {child.pid for child in started if not child.daemon} - idle


def left_at_exit(
    look: Callable[[], Sequence[Process]], idle: float, limit: float, jobs: Sequence[Observer]
) -> list[Process]:
    """Wait until the processes that multiprocessing joins at exit have done no work, and moved no data, for ``idle`` seconds, or
    for ``limit`` seconds; return these processes, and those above and below them, [] if they have ended.

    ``jobs`` look ten times a second.
    """
    began = idle_since = monotonic()
    before = {p.key: (p.cpu, p.moved) for p in look()}
    while True:
        for _ in range(10):
            time.sleep(0.1)
            for job in jobs:
                job.look()
            joined = joined_at_exit()
            if not joined:
                return []
        found = look()
        now, seen = monotonic(), {p.key: (p.cpu, p.moved) for p in found}
        used = [[x - y for x, y in zip(seen[key], before.get(key, (0, 0)), strict=True)] for key in seen]
        if any(cpu > BUSY * TICKS or moved > MOVES for cpu, moved in used):
            idle_since = now
        before = seen
        if now - idle_since >= idle or now - began >= limit:
            return [p for p in of_ranks(found, joined) if not p.has_ended]
