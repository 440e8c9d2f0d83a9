"""The counters of the loops that the main thread is in: written when the monitor requests them, and with an exception.

It requests them before it announces a suspicion, and when it ends a test. Not before: reading a function's locals keeps them
alive (before Python 3.13, as long as the function runs).
"""

import contextlib
import dis
import functools
import itertools
import sys
from json import dumps
from pathlib import Path
from traceback import walk_tb
from types import CodeType, FrameType, GeneratorType

from nsa.trace.events import SCHEMA
from nsa.trace.files import wall_clock, write_atomically
from nsa.trace.frames import describe, describe_line, is_user_file, program_frames
from nsa.trace.stall.held_up import describe_error

FILE = "counters.json"
REQUEST = "counters.asked"
MOST_FRAMES = 256
MOST_STREAMS = 8  # of a frame
MOST_ERRORS = 4  # of a frame
LARGEST = 1 << 53  # JSON readers represent smaller numbers exactly


@functools.cache
def counted_names(code: CodeType) -> tuple[str, ...]:
    """Return the variables of a function that a ``for`` assigns, or that are incremented (``n += 1``), by its byte code."""
    found: dict[str, None] = {}
    sets = False
    for instruction in dis.get_instructions(code):
        name = instruction.opname
        if name == "FOR_ITER" or (name == "BINARY_OP" and instruction.argrepr == "+="):
            sets = True
        elif sets and name.startswith("STORE_") and name not in ("STORE_ATTR", "STORE_SUBSCR", "STORE_SLICE"):
            # From Python 3.13 on, an instruction may have two names; the second may be one that it loads.
            both = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
            found.update(dict.fromkeys(both[: 1 if "LOAD" in name else 2]))
        elif name not in ("UNPACK_SEQUENCE", "CACHE", "EXTENDED_ARG", "NOT_TAKEN"):
            sets = False
    return tuple(str(name) for name in found)


def counters_of(frame: FrameType) -> dict[str, int]:
    """Return the whole numbers among the variables of a frame that count."""
    names = counted_names(frame.f_code)
    if not names:
        return {}
    values = frame.f_locals
    return {n: v for n in names if type(v := values.get(n)) is int and abs(v) < LARGEST}


def _streams_of(frame: FrameType) -> list[str]:
    """Return the locations of the user's generators in the variables of a function with a loop: one of them may be endless."""
    if not counted_names(frame.f_code):
        return []
    generators = [v for v in frame.f_locals.values() if isinstance(v, GeneratorType) and v.gi_frame is not None]
    return [describe(g.gi_frame) for g in generators if is_user_file(g.gi_code.co_filename)][:MOST_STREAMS]


def _list_errors(frame: FrameType) -> list[dict[str, str]]:
    """Return the exceptions in the variables of a frame: they were handled, and the program keeps them."""
    values = [(name, v) for name, v in frame.f_locals.items() if issubclass(type(v), BaseException)][:MOST_ERRORS]
    return [{"name": name, **describe_error(error)} for name, error in values]


def write_counters(folder: Path, thread: int) -> None:
    """Write counters.json: the user's frames of a thread, outermost first, with their counters and the exceptions that they keep;
    and those of libraries that have counters.
    """
    frames: list[dict[str, object]] = []
    for frame, is_user in itertools.islice(program_frames(sys._current_frames().get(thread)), MOST_FRAMES):
        counted = counters_of(frame)
        if is_user or counted:
            kept = {"streams": _streams_of(frame), "errors": _list_errors(frame)} if is_user else {}
            frames.append({"at": describe(frame), "counters": counted, **kept})
    found = {"schema": SCHEMA, "time": wall_clock(), "frames": frames[::-1]}
    with contextlib.suppress(OSError):  # a full disk, or a deleted folder: the test is ended all the same
        write_atomically(folder / FILE, dumps(found))


def counters_at(error: BaseException) -> list[dict[str, object]]:
    """Return the user's frames that an exception has passed through, outermost first, with their counters."""
    passed = ((f, line) for f, line in walk_tb(error.__traceback__) if is_user_file(f.f_code.co_filename))
    return [
        {"at": describe_line(frame.f_code, line), "counters": counters_of(frame)}
        for frame, line in itertools.islice(passed, MOST_FRAMES)
    ]
