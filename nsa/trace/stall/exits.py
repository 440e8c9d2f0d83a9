"""The line at which a process ends or stops itself (``os._exit``, ``os.abort``, a signal), or sends a signal to another one.

It is noted before: no code of a process runs after its end, and its last heartbeat may be 50 ms old.
"""

import functools
import os
import signal
from collections.abc import Callable
from typing import Any

from nsa.trace.board import Board
from nsa.trace.files import wall_clock
from nsa.trace.frames import call_site

OnSignal = Callable[[int, int, str], None]


def note_ends(board: Board, on_signal: OnSignal) -> None:
    """Wrap the functions that end or signal a process: the calling line of an end goes to ``board``.

    ``on_signal`` is called with the process, the signal and the calling line, before a signal is sent.
    """

    def noting(call: Callable[..., Any], sends: Callable[..., tuple[int, int]]) -> Callable[..., Any]:
        @functools.wraps(call)
        def noted(*args: Any, **kwargs: Any) -> Any:
            site = call_site()
            pid, number = sends(*args) if args else (os.getpid(), 0)
            if site and pid == os.getpid():
                board.text("line", site)
                board.number("line_time", wall_clock())
            if site and number:
                on_signal(pid, number, site)
            return call(*args, **kwargs)

        return noted

    os._exit = noting(os._exit, lambda *_: (os.getpid(), 0))
    os.abort = noting(os.abort, lambda *_: (os.getpid(), 0))
    os.kill = noting(os.kill, lambda pid, number=0, *_: (pid, number))
    signal.raise_signal = noting(signal.raise_signal, lambda number, *_: (os.getpid(), number))
