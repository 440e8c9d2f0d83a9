"""The stacks of this process's threads, read by one thread while the others may run."""

import dis
import gc
import sys
import threading
import time
from dataclasses import dataclass
from types import CodeType

MOST_FRAMES = 100  # of a thread
MOST_THREADS = 100
_BETWEEN_CALLS = frozenset(number for name, number in dis.opmap.items() if "JUMP_BACKWARD" in name or name == "RESUME")


@dataclass(frozen=True, slots=True)
class Place:
    """The position of a frame: its code, instruction and line."""

    code: CodeType
    instruction: int
    line: int

    @property
    def is_between_calls(self) -> bool:
        """Whether it is at the end of a loop's body or the start of a function, where Python releases the GIL: not in a call."""
        instructions = self.code.co_code  # made again at each look
        return 0 <= self.instruction < len(instructions) and instructions[self.instruction] in _BETWEEN_CALLS


def look(only: int | None = None) -> dict[int, list[Place]]:
    """Return the stack of each Python thread by its identifier, innermost frame first; with ``only``, of this thread.

    The main thread comes first, so that it is included even if there are more than `MOST_THREADS`.

    faulthandler is not used: it reads threads' states without their lock, and a state that C++ makes for a callback at that moment,
    as gloo does for each future, ends the process (SIGSEGV). A frame that is kept here keeps its function's locals alive, and may
    free them in this thread: a generator's ``finally`` would run here. So no frame is kept for longer than this thread has the
    GIL, which it has just acquired for 5 ms, and the garbage collector is off in that time.
    """
    found: dict[int, list[tuple[CodeType, int, int]]] = {}
    time.sleep(0)
    collects = gc.isenabled()
    gc.disable()
    try:
        frames = sys._current_frames()
        main = threading.main_thread().ident or 0
        idents = [main, *(i for i in frames if i != main)] if only is None else [only]
        for ident in idents[:MOST_THREADS]:
            places = found[ident] = []
            frame = frames.get(ident)
            while frame is not None and len(places) < MOST_FRAMES:
                places.append((frame.f_code, frame.f_lasti, frame.f_lineno))
                frame = frame.f_back
        del frame, frames
    finally:
        if collects:
            gc.enable()
    return {ident: [Place(*place) for place in places] for ident, places in found.items()}


def as_dump(stacks: dict[int, list[Place]], current: int) -> str:
    """Return stacks in faulthandler's form, with ``current`` as the thread that got the signal."""
    return "\n\n".join(
        f"{'Current thread' if ident == current else 'Thread'} 0x{ident:016x} (most recent call first):\n"
        + "\n".join(f'  File "{p.code.co_filename}", line {p.line} in {p.code.co_name}' for p in places)
        for ident, places in stacks.items()
    )
