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
        is_idle = not getattr(thread, "pending_work_items", True)  # a pool's manager without work ends at the exit
        if is_idle or frame is None or not thread.is_alive() or frame.f_code.co_filename.endswith(_POOL):
            continue
        found[thread] = describe(user_frame(frame)) or describe(frame)
        del frame
    return found
