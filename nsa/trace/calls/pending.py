"""A call of a process group that has begun, followed until it is done without extending the life of anything of the program.

gloo forgets the buffer of a send or receive with its Work: a program that drops the Work loses the message, and its partner
waits for ever. A strong reference to the Work would keep the message, and hide the hang while the program is traced.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

Find = Callable[[], Any]  # returns the Work, or None where it has gone


class Pending:
    """An entry of the board that has been entered and not left.

    ``limit``: seconds after which its wait ends by itself, or 0. ``ends_by_wait``: whether the call is done when ``wait`` returns.
    ``is_message``: whether it is a send or receive.
    """

    __slots__ = ("_find", "_future", "ends_by_wait", "index", "is_message", "limit")

    def __init__(self, index: int, limit: float, *, ends_by_wait: bool, is_message: bool) -> None:
        self.index, self.limit, self.ends_by_wait, self.is_message = index, limit, ends_by_wait, is_message
        self._find: Find = _gone
        self._future: Any = None

    def follow(self, work: Any, on_drop: Callable[[object], None]) -> None:
        """Refer to ``work`` weakly; call ``on_drop`` when the program has dropped it.

        Of a collective, the future is kept: gloo completes a collective whatever becomes of its Work, and the future shows it.
        """
        if not self.ends_by_wait and not self.is_message:
            self._find = lambda: work  # on a device the backend keeps the Work itself, until the device is done
            return
        self._future = None if self.is_message else future_of(work)
        try:
            self._find = weakref.ref(work, on_drop)
        except TypeError:  # a Work of Python that allows no weak references: what becomes of it is not known
            self._find = _gone

    def is_done(self) -> bool:
        """Return whether the call has completed, and well. One that failed was never left: the other ranks still wait for it."""
        work = self._find()
        if work is not None:
            return bool(work.is_completed()) and not _failed(future_of(work))
        return self._future is None or (self._future.done() and not _failed(self._future))

    def outlives_its_work(self) -> bool:
        """Return whether the call goes on without the Work, which has just been dropped."""
        return self._future is not None and not self._future.done()


def _gone() -> None:
    """Return None, as a weak reference to what has gone."""
    return


def future_of(work: Any) -> Any:
    """Return the future of a Work; None where its backend has none (some have none for sends and receives)."""
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
