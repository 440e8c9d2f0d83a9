"""How a session ends on a signal: with its evidence and reports, whatever signals follow.

SIGTERM (a job's time limit, a cancelled CI job), SIGHUP (a connection that was dropped) and SIGQUIT end a session with tests on
ranks as Ctrl-C does. The first one interrupts; later ones change nothing. While the reports are written, no signal interrupts; what
other plugins do at the session's end is interrupted, by a later signal, too. The exit code is 128 + the signal's number; Ctrl-C
keeps pytest's 2. Processes that tests fork have the handlers of a session without ranks.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from types import FrameType
from typing import Any

import pytest

from pytest_nsa.system.clock import monotonic

DEFER_S = 15.0  # torchrun gives 30
AGAIN_S = 3.0  # a launcher and a terminal may send several signals at once
ENDS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def at_interrupt(handler: Callable[[int, FrameType | None], Any]) -> Callable[[], None]:
    """Install ``handler`` for Ctrl-C, also as Python's default handler: asyncio and trio replace no other. Return a function that
    undoes it.
    """
    before, default = signal.getsignal(signal.SIGINT), signal.default_int_handler
    signal.signal(signal.SIGINT, handler)
    if before is default:
        signal.default_int_handler = handler

    def undo() -> None:
        if signal.getsignal(signal.SIGINT) is handler:
            signal.signal(signal.SIGINT, before)
        if signal.default_int_handler is handler:
            signal.default_int_handler = default

    return undo


class Signals:
    """A session's handling of signals. It takes those that have their default handler; a handler of the program stays."""

    def __init__(self) -> None:
        self.ended_by = 0
        # Under an outer launcher all processes get the signal: the leader ends the test, and then the others.
        self.defers = False
        self._deferred_since = 0.0
        self._is_interrupted = self._is_ending = self._is_writing = self._is_held = False
        self._interrupted_at = 0.0
        self._pending = 0  # the signal that came while a verdict was written
        self._taken: set[int] = set()
        self._undo_interrupt: Callable[[], None] | None = None

    def take(self) -> None:
        """From now on, interrupt at the first signal. No-op in a thread, where Python allows no handlers."""
        if self._taken or self._undo_interrupt or threading.current_thread() is not threading.main_thread():
            return
        self._take_defaults()
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._undo_interrupt = at_interrupt(self._at_signal)
        os.register_at_fork(after_in_child=self._leave)

    def _take_defaults(self) -> None:
        for number in ENDS:
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, self._at_signal)
                self._taken.add(number)

    def _leave(self, *, ignored: bool = False) -> None:
        """Leave the signals as they were, or ``ignored``."""
        for number in self._taken:
            if signal.getsignal(number) == self._at_signal:
                signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)
        self._taken = set()
        if self._undo_interrupt is not None:
            self._undo_interrupt()
            self._undo_interrupt = None
            if ignored:
                signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _at_signal(self, number: int, frame: FrameType | None) -> None:
        # A handler of the program may call the previous one. In a session without ranks that is SIG_DFL, which it cannot call.
        is_called_by_another = frame is not None and sys._getframe(1) is not frame
        if number == signal.SIGINT or not is_called_by_another:
            self._end(number)

    def _end(self, number: int) -> None:
        if number != signal.SIGINT:
            self.ended_by = self.ended_by or number
        may_again = self._is_ending and monotonic() - self._interrupted_at > AGAIN_S
        if self._is_writing or (self._is_interrupted and not may_again) or self._is_deferred(number):
            return
        if self._is_held:
            self._pending = number
            return
        self._is_interrupted, self._interrupted_at = True, monotonic()
        raise KeyboardInterrupt(signal.Signals(number).name if number != signal.SIGINT else "")

    def _is_deferred(self, number: int) -> bool:
        """Return whether the leader has time left to end the test; should it not, this process interrupts itself."""
        if not self.defers:
            return False
        now = monotonic()
        if not self._deferred_since:
            self._deferred_since = now
            again = threading.Timer(DEFER_S + 1, os.kill, (os.getpid(), number))
            again.daemon = True
            again.start()
        return now - self._deferred_since < DEFER_S

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Delay signals while a verdict is written, so that every test that has ended gets one."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
            if self._pending:
                number, self._pending = self._pending, 0
                self._end(number)

    def begin_test(self) -> None:
        """Reset before a test: an earlier test caught the interrupt, and may have restored a default handler, as asyncio does."""
        self._is_interrupted = False
        self.ended_by = 0
        if self._taken:
            self._take_defaults()

    @contextlib.contextmanager
    def ignored(self) -> Iterator[None]:
        """Ignore signals while the reports are written."""
        self._is_writing = True
        try:
            yield
        finally:
            self._is_writing = False

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, None, None]:
        """Set the exit code. Raise pytest's Exit, after our reports, where a signal interrupts what other plugins do here."""
        self._is_ending = True
        try:
            yield
        except KeyboardInterrupt:
            code = 128 + self.ended_by if self.ended_by else pytest.ExitCode.INTERRUPTED
            pytest.exit("a signal interrupted the end of the session", code)
        if self.ended_by and session.exitstatus == pytest.ExitCode.INTERRUPTED:
            session.exitstatus = 128 + self.ended_by

    def pytest_unconfigure(self) -> None:
        """Restore the handlers; if a signal ended the session, ignore signals, as a late one would change the exit code."""
        self._leave(ignored=bool(self.ended_by))


signals_key = pytest.StashKey[Signals]()
