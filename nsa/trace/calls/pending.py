"""A call of a process group that has begun, followed until it is done without keeping any object of the program alive.

gloo forgets the buffer of a send or receive with its Work: a program that drops the Work loses the message, and its partner
waits for ever. A strong reference to the Work would keep the message, and hide the hang while the program is traced.
"""

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

Find = Callable[[], Any]  # returns the Work, or None if it was freed


class Pending:
    """An entry of the board that has been entered and not left.

    ``limit``: the time limit of its wait in seconds, or 0. ``ends_by_wait``: whether the call is done when ``wait`` returns.
    ``is_message``: whether it is a send or receive.
    """

    __slots__ = ("_find", "_future", "ends_by_wait", "index", "is_message", "limit")

    def __init__(self, index: int, limit: float, *, ends_by_wait: bool, is_message: bool) -> None:
        self.index, self.limit, self.ends_by_wait, self.is_message = index, limit, ends_by_wait, is_message
        self._find: Find = lambda: None
        self._future: Any = None

    def keep(self, work: Any) -> None:
        """Follow a Work that C++ keeps, as ``follow`` does one that is dropped at once."""
        if self.ends_by_wait:
            self._future = future_of(work)
        else:
            self._find = lambda: work

    def follow(self, work: Any, on_drop: Callable[[object], None]) -> None:
        """Refer to ``work`` weakly; call ``on_drop`` when the program has dropped it.

        The future of a collective is kept: gloo completes a collective even if its Work is dropped, and the future shows that.
        """
        if not self.ends_by_wait and not self.is_message:
            self._find = lambda: work  # on a device, the backend itself keeps the Work until it is done
            return
        self._future = None if self.is_message else future_of(work)
        with contextlib.suppress(
            TypeError
        ):  # a Work written in Python that allows no weak references: its state is unknown
            self._find = weakref.ref(work, on_drop)

    def is_done(self) -> bool:
        """Return whether the call has completed without an error. A call that failed counts as not left: other ranks still wait."""
        work = self._find()
        if work is not None:
            return bool(work.is_completed()) and not _failed(future_of(work))
        return self._future is None or (self._future.done() and not _failed(self._future))

    def has_failed(self) -> bool:
        """Return whether the call has ended with an error, as at its time limit."""
        return _failed(self._future)

    def outlives_its_work(self) -> bool:
        """Return whether the call continues although its Work has just been dropped."""
        return self._future is not None and not self._future.done()


def future_of(work: Any) -> Any:
    """Return the future of a Work; None if its backend provides none (some do not for sends and receives)."""
    try:
        return work.get_future()
    except (RuntimeError, NotImplementedError):
        return None


def _failed(future: Any) -> bool:
    # Querying the Work itself is deprecated, and torch warns of it in every rank.
    try:
        if future is not None and future.done():
            future.value()
    except RuntimeError:
        return True
    return False
