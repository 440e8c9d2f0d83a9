"""The user's line that gave work to a thread: a collective that the thread itself calls has no other one.

``asyncio.to_thread(dist.barrier)`` and ``Thread(target=dist.barrier)`` run torch's function in a thread that has no user frame.
"""

import functools
import threading
from concurrent.futures import thread as pool
from typing import Any

from nsa.trace.frames import call_path

_Path = tuple[str, str]
_NAME = "_nsa_path"  # an attribute of a thread, and of a call in an executor
_given = threading.local()  # the call that an executor's thread runs


def path_of_call() -> _Path:
    """Return `call_path` with the lines of a library; in a thread without a user's line, that of the line that gave it its work."""
    path = call_path(within=True)
    if path[0]:
        return path
    given = getattr(_given, "work", None) or threading.current_thread()
    found: _Path = getattr(given, _NAME, path)
    return found


@functools.cache
def install() -> None:
    """Remember the line of each start of a thread, and of each call that an executor of threads is given. Once per process."""
    start = threading.Thread.start

    @functools.wraps(start)
    def started(self: threading.Thread) -> None:
        __tracebackhide__ = True
        setattr(self, _NAME, call_path())
        start(self)

    threading.Thread.start = started  # type: ignore[method-assign]
    work: Any = getattr(pool, "_WorkItem", None)
    if work is None:
        return
    construct, run = work.__init__, work.run

    def constructed(self: Any, *args: Any, **kwargs: Any) -> None:
        setattr(self, _NAME, call_path())
        construct(self, *args, **kwargs)

    def running(self: Any, *args: Any) -> Any:
        __tracebackhide__ = True
        _given.work = self
        try:
            return run(self, *args)
        finally:
            _given.work = None

    work.__init__, work.run = constructed, running
