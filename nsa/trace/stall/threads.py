"""Threads that would keep their process from ending."""

import sys
import threading

from nsa.trace.frames import describe, user_frame

ENDING_S = 0.05  # for a thread that is about to end
_POOL = "/concurrent/futures/thread.py"  # its idle workers end with the process


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
        if (
            not thread.is_alive()
            or frame is None
            or frame.f_code.co_filename.endswith(_POOL)
            or _is_idle_manager(thread)
        ):
            continue
        found[thread] = describe(user_frame(frame)) or describe(frame)
        del frame
    return found


def _is_idle_manager(thread: threading.Thread) -> bool:
    """Return whether a thread manages a pool of processes without pending work, which ends at the exit."""
    return hasattr(thread, "pending_work_items") and not thread.pending_work_items
