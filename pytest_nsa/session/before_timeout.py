"""Call functions at a test's time limit, before and after pytest-timeout ends the test."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import pytest_timeout  # type: ignore[import-untyped]

AGAIN_S = 6.0  # after which a test that is blocked in its cleanup since its limit is ended once more


def by_signal(settings: Any) -> bool:
    """Return whether pytest-timeout raises in the test by SIGALRM; else a thread of it ends the process."""
    return settings.method == "signal" and threading.current_thread() is threading.main_thread()


def call_around_alarm(
    before: Callable[[FrameType | None], object],
    after: Callable[[], bool],
    is_blocked: Callable[[FrameType | None], bool],
) -> None:
    """Call ``before`` with the frame that SIGALRM interrupts, then pytest-timeout's handler, which is set already, then ``after``.

    Where ``after`` returns True, SIGALRM comes again every `AGAIN_S` until pytest-timeout cancels it. Then pytest-timeout's handler
    raises once more if ``is_blocked``, called with the frame, returns True.
    """
    theirs = signal.getsignal(signal.SIGALRM)
    if not callable(theirs):
        return
    is_first = True

    def fire(number: int, frame: FrameType | None) -> None:
        __tracebackhide__ = True
        nonlocal is_first
        if not is_first:
            if is_blocked(frame):
                theirs(number, frame)
            return
        is_first = False
        before(frame)
        try:
            theirs(number, frame)
        finally:
            if after():
                signal.setitimer(signal.ITIMER_REAL, AGAIN_S, AGAIN_S)

    signal.signal(signal.SIGALRM, fire)


def call_before_timer(item: pytest.Item, settings: Any, first: Callable[[FrameType | None], object]) -> None:
    """Replace pytest-timeout's timer by one that calls ``first`` with the main thread's frame, then what pytest-timeout does."""

    def fire() -> None:
        first(sys._current_frames().get(threading.main_thread().ident or 0))
        pytest_timeout.timeout_timer(item, settings)

    def cancel() -> None:
        timer.cancel()
        timer.join()

    item.cancel_timeout()  # type: ignore[attr-defined]
    item.cancel_timeout = cancel  # type: ignore[attr-defined]
    timer = threading.Timer(settings.timeout, fire)
    timer.start()
