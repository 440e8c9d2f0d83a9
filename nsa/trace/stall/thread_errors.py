"""Exceptions of threads other than the main one: uncaught in a thread, or kept by a future or an asyncio task.

The work of such a thread is not done, and a rank that waits for it waits for ever. Each exception is recorded as it is raised; of a
future also that it was retrieved since: then the caller of ``result`` has raised in turn.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

Raised = Callable[[BaseException, str, int], None]  # an exception, whose it is in words, its future's number or 0
Asked = Callable[[int], None]  # a future's number

MOST = 100  # of a test or training: a pool that retries for ever fills no disk
_LEAVES = (SystemExit, GeneratorExit, KeyboardInterrupt)
_NUMBER = "_nsa_number"  # an attribute of a future that keeps an exception

_on_raised: Raised | None = None
_on_asked: Asked | None = None
_numbers = itertools.count(1)


def tell_thread_errors(on_raised: Raised, on_asked: Asked) -> None:
    """Call these from now on. The first call in a process installs the hooks."""
    global _on_raised, _on_asked, _numbers
    install()
    _on_raised, _on_asked, _numbers = on_raised, on_asked, itertools.count(1)


def forget_thread_errors() -> None:
    """The test or training has ended, or this is a child of its process: call nothing more."""
    global _on_raised, _on_asked
    _on_raised = _on_asked = None


def _note(error: BaseException, whose: str, future: Future[Any] | None = None) -> None:
    tell, number = _on_raised, next(_numbers)
    if tell is None or number > MOST or isinstance(error, _LEAVES):
        return
    if future is not None:
        setattr(future, _NUMBER, number)
    tell(error, whose, number if future is not None else 0)


def _note_asked(future: Future[Any]) -> None:
    number, tell = future.__dict__.pop(_NUMBER, 0), _on_asked
    if number and tell is not None:
        tell(number)


@functools.cache
def install() -> None:
    """Replace the hooks, once a process and its forks."""
    hook, keep, handle = threading.excepthook, Future.set_exception, asyncio.BaseEventLoop.call_exception_handler
    ask, look = Future.result, Future.exception

    def ended(args: Any) -> None:
        if args.exc_value is not None:
            _note(args.exc_value, f"thread {args.thread.name if args.thread is not None else '?'}")
        hook(args)

    def kept(self: Future[Any], exception: BaseException | None) -> None:
        if exception is not None:
            _note(exception, f"thread {threading.current_thread().name}", self)
        keep(self, exception)

    def asked(self: Future[Any], timeout: float | None = None) -> Any:
        __tracebackhide__ = True
        try:
            return ask(self, timeout)
        finally:
            _note_asked(self)

    def looked(self: Future[Any], timeout: float | None = None) -> BaseException | None:
        found = look(self, timeout)
        _note_asked(self)
        return found

    def handled(self: asyncio.BaseEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, BaseException):
            _note(error, "an asyncio task")
        handle(self, context)

    threading.excepthook = ended
    Future.set_exception = kept  # type: ignore[method-assign]
    Future.result = asked  # type: ignore[method-assign]
    Future.exception = looked  # type: ignore[method-assign]
    asyncio.BaseEventLoop.call_exception_handler = handled  # type: ignore[method-assign]
