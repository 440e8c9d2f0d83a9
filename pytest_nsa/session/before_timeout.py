"""Call a function at a test's time limit, before pytest-timeout ends the test."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest


def by_signal(settings: Any) -> bool:
    """Return whether pytest-timeout raises in the test by SIGALRM; else a thread of it ends the process."""
    return settings.method == "signal" and threading.current_thread() is threading.main_thread()


def call_before_alarm(first: Callable[[FrameType | None], object]) -> None:
    """Call ``first`` with the frame that SIGALRM interrupts, then pytest-timeout's handler, which is set already."""
    theirs = signal.getsignal(signal.SIGALRM)
    if not callable(theirs):
        return

    def fire(number: int, frame: FrameType | None) -> None:
        __tracebackhide__ = True
        first(frame)
        theirs(number, frame)

    signal.signal(signal.SIGALRM, fire)


def call_before_timer(item: pytest.Item, settings: Any, first: Callable[[FrameType | None], object]) -> None:
    """Replace pytest-timeout's timer by one that calls ``first`` with the main thread's frame, then what pytest-timeout does."""
    import pytest_timeout  # type: ignore[import-untyped]

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
