"""Threads that would keep their process from ending."""

from __future__ import annotations

import sys
import threading
import traceback
from types import FrameType

from nsa.trace.frames import describe, user_frame

ENDING_S = 0.05  # for a thread that is about to end
_POOL = "/concurrent/futures/thread.py"  # its idle workers end with the process
_MANAGERS = (
    "/concurrent/futures/process.py",
    "/loky/process_executor.py",
)  # their threads, too, which they end at exit


def lasting_threads() -> dict[threading.Thread, str]:
    """Return this process's non-daemon threads that still run, with their locations: an interpreter waits for them when it
    ends.
    """
    found = {}
    for thread in threading.enumerate():
        if thread is threading.current_thread() or thread.daemon or thread is threading.main_thread():
            continue
        thread.join(ENDING_S)
        frame = sys._current_frames().get(thread.ident or 0)
        if not thread.is_alive() or frame is None or _ends_with_the_process(frame):
            continue
        found[thread] = describe(user_frame(frame)) or describe(frame)
        del frame
    return found


def _ends_with_the_process(frame: FrameType) -> bool:
    """Return whether a thread with this innermost frame belongs to an executor, which ends it when the process ends."""
    callers = (caller.f_code.co_filename for caller, _ in traceback.walk_stack(frame))
    return frame.f_code.co_filename.endswith(_POOL) or any(file.endswith(_MANAGERS) for file in callers)
