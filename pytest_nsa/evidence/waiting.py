"""Whether a rank waits for other ranks, by the call on its board and by torch's functions that wait.

A file's name is not enough: `get_rank`, DTensor's dispatch and imports are under torch/distributed, and wait for no rank.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pytest_nsa.evidence.source import Sources
from pytest_nsa.evidence.stacks import Frame, ThreadStack

SAMPLED_S = 10.0  # samples of /proc from this time before the last one show whether a thread computes
BUSY = 0.5  # of a core, over the sample
# The kernel's wait channels of a sleep, and of a wait for a child.
SLEEPS = ("hrtimer_nanosleep", "common_nsleep", "do_nanosleep", "do_wait")
STARVED = 0.1  # of a core: what a thread that wants the CPU may get on a busy machine
# Files with the wrappers of recorded calls; without "calls/" in folders of 0.1.
_RECORDERS = tuple(f"nsa/trace/{below}{name}.py" for below in ("calls/", "") for name in ("collectives", "stores"))
_STORE_OF_OURS = ("pytest_nsa/rank/store.py", "pytest_nsa/wire/messages.py")  # the store of ranks is a class of Python
_TORCH_S = ("torch/distributed/", "nn/parallel/distributed.py", "torch/futures/", *_RECORDERS, *_STORE_OF_OURS)
# What torch puts between a Python call and its implementation.
_DISPATCH = (
    "torch/_ops.py", "torch/_library/", "torch/_dynamo/eval_frame.py", "torch/_compile.py", "torch/utils/_contextlib.py",
    "nsa/trace/calls/compiled.py", "nsa/trace/compiled.py",
)  # fmt: skip
_WAITS = re.compile(
    r"_?(barrier|monitored_barrier|store_based_barrier|wait\w*|all_?reduce\w*|all_?gather\w*|all_?to_?all\w*|broadcast\w*"
    r"|reduce\w*|gather\w*|scatter\w*|i?send\w*|i?recv\w*|sync_\w+|rpc_sync|shutdown|synchronize|recorded|recorded_wait)$"
)
_FOR_A_RESULT = re.compile(r"\.(wait|result|value|item|tolist|cpu|numpy|synchronize)\(")
# Calls that return when a device has computed a value, for which it may need other ranks.
FOR_A_DEVICE = re.compile(
    r"\.(item|tolist|cpu|numpy|synchronize|nonzero|elapsed_time)\(|\bprint\(|\bfloat\(|\bint\(|\bbool\(|\bif\b|\bassert\b|\.to\(.cpu"
)
_STORE_CALL = re.compile(r"store\w*\.(get|wait|multi_get|barrier)\(", re.IGNORECASE)
_MEETS = re.compile(r"\b(TCPStore|init_process_group|init_device_mesh|init_rpc)\(")
_LOCK = re.compile(r"\.acquire\(|\bwith\b.*lock|\.wait\(|\.join\(|\.get\(|\.result\(|\.put\(", re.IGNORECASE)
_TAKES = re.compile(r"\.acquire\(|\bwith\b.*(?<![bc])lock", re.IGNORECASE)
_LIMITED = re.compile(r"\btimeout\b|\.(wait|join)\(\s*[^)\s]")
_ENGINE = "_engine_run_backward"


def is_at_a_lock(line: str) -> bool:
    """Return whether a line of source takes a lock, or waits for an event, a thread, a queue or a result."""
    return bool(_LOCK.search(line))


def takes_a_lock(line: str) -> bool:
    """Return whether a line of source takes a lock."""
    return bool(_TAKES.search(line.partition("#")[0]))


def has_a_time_limit(line: str) -> bool:
    """Return whether a line of source waits for an event, a lock, a thread or a queue with a time limit."""
    return bool(_LIMITED.search(line))


def wait_for_ever(threads: Iterable[ThreadStack], sources: Sources, *, has_children: bool) -> bool:
    """Return whether a process has ended its program, and each of its threads waits for another one without a time limit.

    A loop that only sleeps until a variable changes is such a wait: with no child process, only a thread can change it.
    """
    found = list(threads)
    return any(t.is_at_exit for t in found) and all(
        _waits_for_a_thread(t, sources) or (not has_children and _polls_memory(t, sources)) for t in found
    )


def _waits_for_a_thread(thread: ThreadStack, sources: Sources) -> bool:
    if not thread.waits_in_python:
        return False
    frame = thread.user_frame
    if frame is None:
        return thread.is_main
    line = sources.line(frame.file, frame.line)  # '' where it is not known
    return bool(line) and not has_a_time_limit(line)


def _polls_memory(thread: ThreadStack, sources: Sources) -> bool:
    frame = thread.user_frame
    if frame is None or not (thread.waits_in_python or thread.frames[0] == frame):
        return False
    around = sources.around(frame.describe())
    loop = next((s for s in reversed(around) if isinstance(s, ast.For | ast.While)), None)
    # A constant is no condition, and what else the body calls may change the variable.
    return (
        isinstance(loop, ast.While)
        and not isinstance(loop.test, ast.Constant)
        and _is_of_memory(loop.test)
        and all(isinstance(s, ast.Pass) or (isinstance(s, ast.Expr) and _is_a_pause(s.value)) for s in loop.body)
    )


def _is_of_memory(condition: ast.expr) -> bool:
    """Return whether variables and events alone decide a condition; an attribute may be a property that reads a file or a clock."""
    match condition:
        case ast.Name() | ast.Constant() | ast.Call(func=ast.Attribute(attr="is_set" | "wait")):
            return True
        case ast.UnaryOp(operand=operand):
            return _is_of_memory(operand)
        case ast.BoolOp(values=values):
            return all(map(_is_of_memory, values))
        case ast.Compare(left=left, comparators=others):
            return all(map(_is_of_memory, (left, *others)))
    return False


def _is_a_pause(expression: ast.expr) -> bool:
    match expression:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=args):
            return name in ("sleep", "wait") and all(isinstance(of, ast.Constant | ast.Name) for of in args)
    return False


def computes(process: Mapping[str, Any]) -> bool:
    """Return whether the main thread of a process is at work, by a sample of /proc; a thread that wants the CPU may get little."""
    share = share_of_main(process)
    return share >= BUSY or (bool(process.get("wants_cpu")) and share >= STARVED)


def latest_share_of_main(process: Mapping[str, Any]) -> float:
    """Return the main thread's share of a core in the last interval of the samples of /proc."""
    share: float = process.get("main_cpu_share", process.get("cpu_share", 0.0))
    return share


def share_of_main(process: Mapping[str, Any]) -> float:
    """Return the main thread's share of a core, the largest that samples of /proc show while it wants the CPU."""
    return max(latest_share_of_main(process), process.get("stall_cpu_share", 0.0))


def latest_sample(samples: Sequence[dict[str, Any]], stalled_s: float) -> dict[str, Any]:
    """Return a rank's last sample of /proc; of one that still wants the CPU, with its largest share of it within a stall of
    ``stalled_s`` seconds, as ``stall_cpu_share``: the last interval is short, and on a busy machine other processes may have had
    all of it.
    """
    last = samples[-1] if samples else {}
    if not last.get("wants_cpu") or "main_cpu_s" not in last:
        return last
    shares = [
        (last["main_cpu_s"] - e["main_cpu_s"]) / (last["time"] - e["time"])
        for e in samples
        if "main_cpu_s" in e and 0.0 < last["time"] - e["time"] <= min(SAMPLED_S, stalled_s)
    ]
    return {**last, "stall_cpu_share": max(shares, default=0.0)}


def torch_wait(frames: Sequence[Frame]) -> str:
    """Return the function of torch in which a thread waits for other ranks; '' if it does not. Frames innermost first.

    Every frame from the innermost to that function must be torch's: if it has called other code (pickling, an import), the
    thread is at work. It may wait for an event that a thread of torch's sets, as in RPC.
    """
    found = ""
    for frame in itertools.dropwhile(_is_of_an_event, frames):
        if any(part in frame.file for part in _DISPATCH):
            continue
        if frame.is_user or not any(part in frame.file for part in _TORCH_S):
            break
        if _WAITS.match(frame.function):
            found = frame.function
    return found


def _is_of_an_event(frame: Frame) -> bool:
    return frame.file.endswith("/threading.py") and frame.function == "wait"


def _depth(frames: Sequence[Frame]) -> int:
    """Return how many of the innermost frames belong to the plugin's store and torch's dispatch."""
    skipped = (*_STORE_OF_OURS, *_DISPATCH)
    return next((i for i, f in enumerate(frames) if not any(part in f.file for part in skipped)), len(frames))


def in_recorded_call(frames: Sequence[Frame]) -> bool:
    """Return whether a thread waits inside a call that the board records, and not in other code that this calls."""
    return any(_is_recorder(f) for f in frames[: _depth(frames) + 3]) and bool(torch_wait(frames))


def waits_for_a_result(frames: Sequence[Frame], line: str) -> bool:
    """Return whether a thread is at a call that returns when earlier collectives have completed; ``line`` is its source.

    These are the end of a backward under DDP, which waits in C++, and a future's or a device's result.
    """
    if not frames:
        return False
    return is_in_engine(frames) or (frames[0].is_user and bool(_FOR_A_RESULT.search(line)))


def is_in_engine(frames: Sequence[Frame]) -> bool:
    """Return whether a thread is in autograd's engine, which waits for DDP's reductions where the model has them."""
    return bool(frames) and frames[0].function == _ENGINE


def _is_recorder(frame: Frame) -> bool:
    return any(file in frame.file for file in _RECORDERS)


def waits_for_a_key(frames: Sequence[Frame], line: str) -> bool:
    """Return whether a thread waits for a key of a store. ``line``: the text of the user's line."""
    recorded = next((f for f in frames[: _depth(frames) + 1] if _is_recorder(f)), None)
    if recorded is not None and recorded.function == "wait_for_a_key":
        return True
    if not frames or not _STORE_CALL.search(line):
        return False
    # A queue or a dictionary may also be named store: then the innermost frame is Python's.
    return frames[0].is_user or any(part in frames[0].file for part in _TORCH_S)


def meets(frames: Sequence[Frame], line: str) -> bool:
    """Return whether a thread joins a process group: it connects to the host at which ranks meet, or waits for them there."""
    called = list(itertools.takewhile(lambda frame: not frame.is_user, frames))
    return bool(_MEETS.search(line)) and all(any(part in f.file for part in (*_TORCH_S, *_DISPATCH)) for f in called)
