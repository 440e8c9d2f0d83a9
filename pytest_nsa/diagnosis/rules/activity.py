"""What a rank is blocked in, by its own evidence alone: one rule for each kind of evidence, the most reliable first."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass

from pytest_nsa.diagnosis.explain.locations import line_of_its_loop, split_place
from pytest_nsa.diagnosis.explain.source import is_in_while
from pytest_nsa.diagnosis.facts import user_frame
from pytest_nsa.diagnosis.rules.exits import waits_for_its_device
from pytest_nsa.diagnosis.words import describe_inner_wait, in_symbol, who_holds
from pytest_nsa.evidence.stacks import MOST_FRAMES, Frame, ThreadStack
from pytest_nsa.evidence.values import SILENT_S, STILL_LOOKS, RankEvidence
from pytest_nsa.evidence.waiting import (
    BUSY,
    STARVED,
    computes,
    is_at_a_lock,
    latest_share_of_main,
    meets,
    share_of_main,
    takes_a_lock,
)

SHOWN = 0.95  # the confidence in what a rank's stack and process show: right on 88 of 90 recorded faults
FAULTS = 1000  # page faults per second: a process that allocates memory is in the kernel, too
IN_KERNEL = 0.15  # share of CPU time: a loop that polls a file or a socket is often in the kernel
MOVES = 0.2  # share of the heartbeat's samples in which the main thread had moved
IDLE = 0.01  # of a core
GIL_WAIT_STARVED_MS = 4.5
GIL_WAIT_MS = 2.5  # per beat; Python code releases the GIL every 5 ms
_LOCK_FILES = ("/threading.py", "/queue.py", "/concurrent/futures/", "/multiprocessing/synchronize.py")
_COMPILERS = ("torch/_inductor/", "torch/_dynamo/", "torch/_functorch/", "/triton/")
_IO = re.compile(
    r"\.recv\w*\(|\.send(all|msg|to|file)?\(|\.accept\(|\.read\w*\(|\bopen\(|\.connect\(|\binput\(|urlopen|\.flock\(|\.lockf\("
    r"|\bselect\((?!\[\], \[\], \[\])|\.poll\(|\.eventfd_read\(|\.sigwait(info)?\("
)
_SLEEPS = re.compile(r"\bsleep\w*\(")
_IO_FILES = ("/socket.py", "/ssl.py", "/http/client.py", "/multiprocessing/connection.py")
_IO_WAITS = (
    "pipe", "fifo", "nfs", "unix_stream", "tcp_recv", "wait_for_partner", "wait_woken", "sk_wait", "csk_accept", "skb_wait",
    "sock_alloc_send", "sk_stream_wait_memory", "flock", "posix_lock", "io_schedule", "folio_wait", "do_wait_intr",
    "eventfd", "signalfd", "timerfd", "inotify_read", "do_msgrcv", "do_msgsnd", "mq_timed", "wq_sleep", "n_tty_read",
    "sigtimedwait",
)  # fmt: skip
_CHILD_FILES = ("/subprocess.py", "/multiprocessing/popen_fork.py", "/multiprocessing/popen_spawn_posix.py")
_POOL_FILES = ("/multiprocessing/pool.py", "/concurrent/futures/process.py")
_LOADER = "torch/utils/data/dataloader.py"


@dataclass(frozen=True, slots=True)
class Activity:
    """What a rank does instead of meeting the others: ``cause`` and its ``description``.

    ``where`` is the line, where the rank's stack does not show it; ``holders`` are the ranks that hold the lock that
    this one waits for; ``is_of_unknown_file``: it is a lock on a file, and the rank has that file closed between two attempts.
    """

    cause: str
    description: str
    where: str = ""
    holders: tuple[int, ...] = ()
    is_of_unknown_file: bool = False


def find_activity(rank: RankEvidence) -> Activity | None:
    """Return what a rank is blocked in; None where no evidence shows it."""
    rules: tuple[Callable[[RankEvidence], Activity | None], ...] = (
        _stopped, _left_thread, _compiling, _importing,
        _loader, _failed_child, _child, _pool, _device, _gil_held, _meets, _file_lock, _polled_file,
        _asyncio, _polled_lock, _sleeping, _busy, _blocked_child, _io, _lock, _io_by_source, _backward,
    )  # fmt: skip
    return next((activity for rule in rules if (activity := rule(rank)) is not None), None)


def _library_files(rank: RankEvidence) -> list[str]:
    """Return the files of the frames that the user's innermost line called, innermost first."""
    return [frame.file for frame in _library_frames(rank)]


def _library_frames(rank: RankEvidence) -> list[Frame]:
    frames = rank.stack.frames if rank.stack is not None else ()
    return list(itertools.takewhile(lambda frame: not frame.is_user, frames))


def _source(rank: RankEvidence) -> str:
    frame = user_frame(rank)
    return rank.sources.line(frame.file, frame.line) if frame is not None else ""


def _wchan(rank: RankEvidence) -> str:
    return str(rank.process.get("wchan", ""))


def _stopped(rank: RankEvidence) -> Activity | None:
    state = rank.process.get("state", "?")
    text = f"is stopped (state {state}): SIGSTOP or a debugger"
    return Activity("rank_stopped", text) if state in ("T", "t") else None


def _left_thread(rank: RankEvidence) -> Activity | None:
    """Find that the interpreter waits for a thread before it exits; a thread at work shows by itself what it does."""
    main = next((t for t in rank.threads if t.is_main), None)
    if (
        main is None
        or rank.threads_at_work
        or not any(f.function == "_shutdown" and f.file.endswith("/threading.py") for f in main.frames)
    ):
        return None
    frames = (t.user_frame for t in rank.threads if not t.is_main)
    where = next((frame.describe() for frame in frames if frame is not None), "")
    return Activity("lock_deadlock", "has ended its program, and waits for a thread that is no daemon", where)


def _compiling(rank: RankEvidence) -> Activity | None:
    frames = rank.stack.frames if rank.stack is not None else ()
    in_compiler = any(part in f.file for f in frames for part in _COMPILERS)
    # The frames of a compiled function run below dynamo's, and are no compilation.
    running = any(f.function in ("_fn", "compile_wrapper") for f in frames)
    compiling = any(
        part in f.file
        for f in frames
        for part in ("convert_frame.py", "/_inductor/", "output_graph.py", "/triton/compiler")
    )
    if not in_compiler or not (compiling or not running):
        return None
    imports = any(file.startswith("<frozen importlib") for file in _library_files(rank))
    return Activity("compiling", "imports torch's compiler" if imports else "compiles")


def _importing(rank: RankEvidence) -> Activity | None:
    """Find that the rank imports a module, which reads files and runs their code."""
    frames = _library_frames(rank)
    if not any(f.file.startswith("<frozen importlib") for f in frames):
        return None
    module = next((f.file for f in frames if f.function == "<module>"), "a module")
    works = computes(rank.process) or rank.process.get("state") == "D"
    return Activity("slow", f"imports {module}") if works else None


def _loader(rank: RankEvidence) -> Activity | None:
    if not any(_LOADER in file for file in _library_files(rank)) or computes(rank.process):
        return None  # a loader without workers computes in this process
    for stacks in rank.children_threads:
        main = next((t for t in stacks if t.is_main), None)
        if main is not None and main.user_frame is not None:
            where = main.user_frame.describe()
            return Activity("dataloader_stuck", f"waits for its data loader, whose worker is blocked at {where}", where)
    return Activity("dataloader_stuck", "waits for its data loader")


def _failed_child(rank: RankEvidence) -> Activity | None:
    """Find that the rank waits in multiprocessing for another process, and one that it started has ended by a failure."""
    failed = [end for end in rank.process.get("ended", ()) if end != "exit code 0"]
    if not failed or not any("/multiprocessing/" in file for file in _library_files(rank)):
        return None
    ends = ", ".join(dict.fromkeys(failed))
    which = "one that it started has" if len(failed) == 1 else f"{len(failed)} that it started have"
    return Activity("child_process", f"waits for another process, and {which} failed ({ends})")


def _child(rank: RankEvidence) -> Activity | None:
    if not any(file.endswith(_CHILD_FILES) for file in _library_files(rank)) and _wchan(rank) != "do_wait":
        return None
    commands = ", ".join(rank.process.get("children", ())).replace("; ", ";") or "unknown"  # no statement ends in it
    works = " that computes" if rank.process.get("below_cpu_share", 0.0) >= BUSY else ""
    return Activity("child_process", f"waits for a child process{works}: {commands}")


def _blocked_child(rank: RankEvidence) -> Activity | None:
    """Find that the rank waits in multiprocessing, and a process that it has started is in a line of the user's."""
    if not any("/multiprocess" in file for file in _library_files(rank)):  # the package `multiprocess`, too
        return None
    for stacks in rank.children_threads:
        main = next((t for t in stacks if t.is_main), None)
        # Below the beginning of a fork are the frames of the rank.
        own = itertools.takewhile(lambda f: f.function != "_bootstrap", main.frames if main is not None else ())
        frame = next((f for f in own if f.is_user), None)
        if frame is not None:
            text = f"waits for a process that it has started, which is at {frame.describe()}"
            return Activity("child_process", text, frame.describe())
    return None


def _pool(rank: RankEvidence) -> Activity | None:
    """Find that the rank waits for a result of a pool of processes."""
    number, files = len(rank.process.get("children", ())), _library_files(rank)
    # A future's result: of threads, or of processes.
    if any(file.endswith("/concurrent/futures/_base.py") for file in files):
        files = [frame.file for thread in rank.threads for frame in thread.frames]
    if not number or not any(file.endswith(_POOL_FILES) for file in files):
        return None
    idle = ", which use no CPU" if rank.process.get("below_cpu_share", 1.0) < IDLE else ""
    return Activity("child_process", f"waits for a result of its pool, of {number} processes{idle}")


def _device(rank: RankEvidence) -> Activity | None:
    description = waits_for_its_device(rank)
    return Activity("device_busy", description) if description else None


def _gil_held(rank: RankEvidence) -> Activity | None:
    if not is_silent(rank):
        return None
    thread = _thread_that_holds_the_gil(rank)
    where = thread.user_frame.describe() if thread is not None and thread.user_frame is not None else ""
    aside = " in a side thread" if thread is not None else ""
    return Activity("gil_held", f"holds the GIL in native code{aside}{in_symbol(rank)}", where)


def is_silent(rank: RankEvidence) -> bool:
    """Return whether a rank's heartbeat has stopped, and not for lack of a core: its thread waits for the GIL."""
    is_starved = rank.process.get("wants_cpu") and latest_share_of_main(rank.process) < STARVED  # so is its heartbeat
    is_stopped = rank.process.get("state") in ("T", "t")
    return rank.beat_age_s is not None and rank.beat_age_s > SILENT_S and not is_starved and not is_stopped


def computes_aside(rank: RankEvidence) -> bool:
    """Return whether a thread other than the main one computes."""
    return rank.process.get("cpu_share", 0.0) - share_of_main(rank.process) >= BUSY


def _thread_that_holds_the_gil(rank: RankEvidence) -> ThreadStack | None:
    """Return the side thread at work, if only one is, of a rank with a main thread that is in a call or computes nothing."""
    is_inside = rank.board is not None and rank.board.blocked is not None
    if not is_inside and not computes_aside(rank):
        return None
    return rank.threads_at_work[0] if len(rank.threads_at_work) == 1 else None


def _busy(rank: RankEvidence) -> Activity | None:
    """Find that the rank computes, on a busy machine too: a rank that waits uses almost no CPU."""
    whole = rank.process.get("cpu_share", 0.0)
    of_main = share_of_main(rank.process)
    shows_other = rank.stack is not None and not rank.stack.is_main
    computes_there = of_main >= STARVED or (shows_other and whole - of_main >= BUSY)
    return _computing_activity(rank) if computes_there else None


def _computing_activity(rank: RankEvidence) -> Activity:
    stack, frame = rank.stack, user_frame(rank)
    n = rank.board.numbers if rank.board is not None else {}
    # On a busy machine the heartbeat is late for lack of a core, too.
    limit = GIL_WAIT_MS if rank.process.get("cpu_share", 0.0) >= BUSY else GIL_WAIT_STARVED_MS
    fights = rank.process.get("gil_wait_ms", 0.0) > limit
    looks, moves = n.get("still_looks", 0.0), n.get("still_moves", 0.0)
    # A thread that stays at one instruction runs no Python.
    in_python = moves > MOVES * looks or (fights and not (looks >= STILL_LOOKS and moves <= 1))
    # A loop that polls the kernel is sampled at the same instruction each time: where it releases the GIL.
    in_kernel = rank.process.get("kernel_share", 0.0) >= IN_KERNEL and rank.process.get("faults_per_s", 0.0) < FAULTS
    if frame is not None and in_kernel and is_in_while(rank.sources, frame.describe()):
        return Activity(
            "infinite_loop", "polls without a pause for something that does not arrive", line_of_its_loop(rank)
        )
    if not looks and stack is not None and frame is not None:  # only the stack can show it, without a tracer's frames
        in_python = next((f for f in stack.frames if "/nsa/trace/" not in f.file), None) == frame
    # Native calls in a `while` return: the loop does not end.
    if moves > 1 and frame is not None and looks >= STILL_LOOKS and is_in_while(rank.sources, frame.describe()):
        in_python = True
    if in_python:
        recursion = _recursion(rank)
        if recursion:
            return Activity("infinite_loop", "runs in a recursion without making progress", recursion)
        return Activity("infinite_loop", "runs in Python without making progress", line_of_its_loop(rank))
    return Activity("native_busy", f"is busy in native code{in_symbol(rank)}")


def _recursion(rank: RankEvidence) -> str:
    """Return where a function was called that is at least three levels deep in itself; '' without one."""
    frames = [f for f in rank.stack.frames if f.is_user] if rank.stack is not None else []
    if not frames:
        return ""
    inner = (frames[0].file, frames[0].function)
    depth = [i for i, f in enumerate(frames) if (f.file, f.function) == inner]
    if len(depth) < 3:
        return ""
    is_cut = len(rank.stack.frames) >= MOST_FRAMES if rank.stack is not None else False
    outer = depth[-1] + 1
    return frames[outer].describe() if outer < len(frames) else frames[depth[-1]].describe() if is_cut else ""


def _sleeping(rank: RankEvidence) -> Activity | None:
    # What a library's function sleeps in is not in the user's line.
    return Activity("sleeping", "sleeps") if _sleeps(rank) else None


def _io(rank: RankEvidence) -> Activity | None:
    wchan = _wchan(rank)
    if rank.process.get("state") != "D" and not any(part in wchan for part in _IO_WAITS):
        return None
    return Activity("io_stuck", f"waits for I/O ({wchan or 'state D'})")


def _io_by_source(rank: RankEvidence) -> Activity | None:
    files = _library_files(rank)
    by_file = any(file.endswith(_IO_FILES) for file in files[:4])
    return Activity("io_stuck", "waits for I/O") if by_file or _IO.search(_source(rank)) else None


def _asyncio(rank: RankEvidence) -> Activity | None:
    """Find that the rank's asyncio loop is idle: by its timers and files, and by what its tasks wait for."""
    files, loop = _library_files(rank), rank.loop
    if not any("/asyncio/" in file for file in files):
        return None
    thread = _executor_thread(rank)
    if thread is not None:
        return _in_executor(rank, thread)
    if loop is None:
        return Activity("io_stuck", "waits in asyncio's loop for something that does not arrive")
    where = loop.tasks[0] if loop.tasks else ""
    if loop.files:
        return Activity("io_stuck", "waits in asyncio's loop for data from a socket or a pipe", where)
    frame = split_place(where)
    if loop.timers and "sleep(" in rank.sources.line(frame[0], frame[1]):
        return Activity("sleeping", "sleeps in asyncio's loop", where)
    if loop.timers:
        return Activity("lock_deadlock", "waits in asyncio's loop for something that a timer alone may complete", where)
    text = "waits in asyncio's loop for something that no task, timer or file will complete"
    return Activity("lock_deadlock", text, where)


def _executor_thread(rank: RankEvidence) -> ThreadStack | None:
    """Return an executor's thread that runs a call; None where all its threads are idle."""
    return next((thread for thread in rank.threads if thread.runs_a_call and thread is not rank.stack), None)


def _in_executor(rank: RankEvidence, thread: ThreadStack) -> Activity:
    """Return that an asyncio loop waits for an executor's thread: at the user's line in the thread, else at that of the task, which
    gave the thread a library's function.
    """
    text = "waits in asyncio's loop for a thread of its executor"
    if thread.user_frame is not None:
        at = thread.user_frame.describe()
        return Activity("io_stuck", f"{text}, which is at {at}", at)
    where = rank.loop.tasks[0] if rank.loop is not None and rank.loop.tasks else ""
    frame = split_place(where)
    if where and re.search(r"\bsleep\b", rank.sources.line(frame[0], frame[1])):
        return Activity("sleeping", f"{text}, which sleeps", where)
    inner = next((f for f in thread.frames if not f.is_ours), thread.frames[0]).describe()
    return Activity("io_stuck", f"{text}, which is at {inner}", where or inner)


def _meets(rank: RankEvidence) -> Activity | None:
    about = rank.stack is not None and meets(rank.stack.frames, _source(rank))
    text = "tries to meet other ranks at the rendezvous host of a group"
    return Activity("init_timeout", text) if about else None


def _file_lock(rank: RankEvidence) -> Activity | None:
    """Find that the rank waits in the kernel for a lock on a file."""
    path, holders = rank.process.get("waits_for_lock"), tuple(rank.process.get("held_by", ()))
    if not path:
        return None
    return Activity("lock_deadlock", f"waits for a lock on {path}{who_holds(rank, holders)}", holders=holders)


def _polled_file(rank: RankEvidence) -> Activity | None:
    """Find that the rank sleeps while it has a file open that another rank has locked: it polls for the lock."""
    path, holders = rank.process.get("open_and_locked"), tuple(rank.process.get("locked_by", ()))
    if not path or not _sleeps(rank):
        return None
    return Activity("lock_deadlock", f"polls for a lock on {path}{who_holds(rank, holders)}", holders=holders)


def _polled_lock(rank: RankEvidence) -> Activity | None:
    """Find that the rank's line takes a lock, for which a library sleeps between its attempts."""
    source = _source(rank)
    if not _library_files(rank) or not takes_a_lock(source) or _SLEEPS.search(source) or not _sleeps(rank):
        return None
    return Activity("lock_deadlock", "polls for a lock", is_of_unknown_file=True)


def _sleeps(rank: RankEvidence) -> bool:
    in_kernel = any(word in _wchan(rank) for word in ("nanosleep", "pause", "sigsuspend"))
    return in_kernel or bool(_SLEEPS.search(_source(rank).partition("#")[0]))


def _lock(rank: RankEvidence) -> Activity | None:
    if any(part in file for file in _library_files(rank)[:3] for part in _IO_FILES):
        return None
    by_file = any(part in file for file in _library_files(rank)[:1] for part in _LOCK_FILES)
    source = is_at_a_lock(_source(rank))
    stack, frame = rank.stack, user_frame(rank)
    # The kernel reports what the main thread waits in, of no other one.
    by_wait = "futex" in _wchan(rank) and stack is not None and stack.is_main and stack.frames[0] == frame
    if not (by_file or source or by_wait):
        return None
    hook = ", in a gradient hook" if stack is not None and stack.is_in_hook else ""
    description = f"waits for {describe_inner_wait(_library_frames(rank), _source(rank))}{hook}"
    return Activity("lock_deadlock", description)


def _backward(rank: RankEvidence) -> Activity | None:
    board = rank.board
    if board is None or board.phase != "backward" or board.numbers["gradients"]:
        return None
    return Activity("backward_deadlock", "is blocked in backward before any gradient")
