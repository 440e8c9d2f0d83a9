"""The line at which a process ends or stops itself (``os._exit``, ``os.abort``, a signal to itself), noted before it does.

No code of the process runs afterwards, and its last heartbeat may be 50 ms old.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from typing import Any

from nsa.trace.board import Board
from nsa.trace.files import wall_clock
from nsa.trace.frames import call_site


def note_own_end(board: Board) -> None:
    """Wrap the functions that end or signal this process, so that the calling line is written to ``board`` first."""

    def noting(call: Callable[..., Any], *, is_own: Callable[[tuple[Any, ...]], bool]) -> Callable[..., Any]:
        @functools.wraps(call)
        def noted(*args: Any, **kwargs: Any) -> Any:
            if is_own(args):
                site = call_site()
                if site:
                    board.text("line", site)
                    board.number("line_time", wall_clock())
            return call(*args, **kwargs)

        return noted

    os._exit = noting(os._exit, is_own=lambda _: True)
    os.abort = noting(os.abort, is_own=lambda _: True)
    os.kill = noting(os.kill, is_own=lambda args: bool(args) and args[0] == os.getpid())
    signal.raise_signal = noting(signal.raise_signal, is_own=lambda _: True)
