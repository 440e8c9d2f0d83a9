"""The state of a stalled thread that its stack does not show: the exception that it handles, and the tasks of its asyncio loop.

The heartbeat reads both. Reading runs no code of the program, and keeps no frame of it.
"""

import asyncio
import sys
from traceback import walk_tb
from types import FrameType, TracebackType
from typing import Any

from nsa.trace.frames import describe, describe_line, is_user_file
from nsa.trace.secrets import masked

MOST_TASKS = 32
MOST_CHARACTERS = 300
MOST_FRAMES = 2000  # an endless recursion makes frames faster than they are walked
_OWN_FILES = 1  # an event loop listens to its own socket, by which other threads wake it


def handled_exception(thread: int) -> dict[str, str]:
    """Return the exception that a thread handles now, in an ``except``, a ``finally`` or an ``__exit__``; {} without one.

    ``says`` has its type and first argument, ``at`` the user's line that raised it, ``in`` the current line of the frame that
    handles it.
    """
    found: Any = sys._current_exceptions().get(thread)
    error: BaseException | None = found[1] if isinstance(found, tuple) else found  # until Python 3.12 a tuple
    traceback: TracebackType | None = error.__traceback__ if error is not None else None
    if error is None or traceback is None:
        return {}
    return {**describe_error(error), "in": describe(traceback.tb_frame)}


def describe_error(error: BaseException) -> dict[str, str]:
    """Return type and first argument of an exception (of an OSError, its text and file), and the user's line that raised it."""
    passed = ((frame.f_code, line) for frame, line in walk_tb(error.__traceback__))
    raised = [describe_line(code, line) for code, line in passed if is_user_file(code.co_filename)]
    first = error.args[0] if error.args and isinstance(error.args[0], str) else ""
    if isinstance(error, OSError) and len(error.args) > 1:  # by OSError's own attributes: a subclass may define others
        text, file = (vars(OSError)[name].__get__(error) for name in ("strerror", "filename"))
        first = f"{text}: {file}" if isinstance(file, str) else str(text)
    return {"says": masked(f"{type(error).__name__}: {first}"[:MOST_CHARACTERS]), "at": raised[-1] if raised else ""}


def asyncio_tasks(thread: int) -> dict[str, Any]:
    """Return what the asyncio loop that a thread runs waits for; {} if it runs none.

    ``tasks``: the user's innermost line of each task that is not done; the first is that of the loop's main task, or of the task
    that it awaits; ``timers`` and ``files``: how many may wake the loop; ``failed``: exceptions of ended tasks that were never
    retrieved.
    """
    loop, main = _running_loop(sys._current_frames().get(thread))
    if loop is None:
        return {}
    first = _awaited_by(main)
    tasks = [
        place for task in list(asyncio.all_tasks(loop))[:MOST_TASKS] if task is not first and (place := _place_of(task))
    ]
    place = _place_of(first)
    timers = sum(not handle.cancelled() for handle in list(getattr(loop, "_scheduled", ())))
    selector = getattr(loop, "_selector", None)
    files = len(selector.get_map()) - _OWN_FILES if selector is not None else 0
    return {
        "tasks": [*([place] if place else []), *sorted(tasks)], "timers": timers, "files": max(0, files),
        "failed": [describe_error(error) for error in _kept_by_tasks(loop)][:MOST_TASKS],
    }  # fmt: skip


def _running_loop(frame: FrameType | None) -> tuple[Any, Any]:
    """Return the loop that a thread runs, and the future of ``run_until_complete``, from the variables of asyncio's frames."""
    loop = None
    for _ in range(MOST_FRAMES):
        if frame is None:
            break
        code = frame.f_code
        if code.co_filename.endswith("asyncio/base_events.py"):
            if code.co_name == "run_forever":
                loop = frame.f_locals.get("self")
            elif code.co_name == "run_until_complete" and loop is not None:
                return loop, frame.f_locals.get("future")
        frame = frame.f_back
    return loop, None


def _kept_by_tasks(loop: Any) -> list[BaseException]:
    """Return the exceptions with which tasks of a loop have ended and that were never retrieved, by asyncio's own mark."""
    known: set[Any] = set()
    for name in ("_all_tasks", "_scheduled_tasks", "_eager_tasks"):  # the first until Python 3.11
        known.update(getattr(asyncio.tasks, name, ()))
    ended = [task for task in known if task.done() and not task.cancelled() and task.get_loop() is loop]
    return [error for t in ended if getattr(t, "_log_traceback", False) and (error := t._exception) is not None]


def _awaited_by(task: Any) -> Any:
    """Return the task that a task awaits, directly or by ``gather``, and so on to the one that awaits no other."""
    for _ in range(MOST_TASKS):
        waiter = getattr(task, "_fut_waiter", None)
        children = [child for child in getattr(waiter, "_children", ()) if not child.done()]
        following = children[0] if children else waiter
        if not isinstance(following, asyncio.Task):
            break
        task = following
    return task


def _place_of(task: Any) -> str:
    """Return the user's innermost line of a task, through the coroutines that await each other."""
    place, coroutine = "", task.get_coro() if isinstance(task, asyncio.Task) else None
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is not None and is_user_file(frame.f_code.co_filename):
            place = describe(frame)
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
    return place
