"""Exceptions of threads other than the main one: uncaught in a thread, or kept by a future or an asyncio task.

The work of such a thread is not done, and a rank that waits for it waits for ever. Each exception is recorded when it is raised.
For a future, it is also recorded that the exception was retrieved: then the caller of ``result`` has raised it, too.
"""

import asyncio
import functools
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

Raised = Callable[[BaseException, str, int], None]  # an exception, its owner in words, its future's number or 0
Retrieved = Callable[[int], None]  # a future's number

MOST = 100  # per test or training, so that a pool that retries for ever does not fill the disk
_LEAVES = (SystemExit, GeneratorExit, KeyboardInterrupt)
_NUMBER = "_nsa_number"  # an attribute of a future that keeps an exception

_on_raised: Raised | None = None
_on_retrieved: Retrieved | None = None
_numbers = itertools.count(1)


def report_thread_errors(on_raised: Raised, on_retrieved: Retrieved) -> None:
    """Call these functions from now on. The first call in a process installs the hooks."""
    global _on_raised, _on_retrieved, _numbers
    install()
    _on_raised, _on_retrieved, _numbers = on_raised, on_retrieved, itertools.count(1)


def forget_thread_errors() -> None:
    """Stop reporting: the test or training has ended, or this is a forked child."""
    global _on_raised, _on_retrieved
    _on_raised = _on_retrieved = None


def _note(error: BaseException, owner: str, future: Future[Any] | None = None) -> None:
    report, number = _on_raised, next(_numbers)
    if report is None or number > MOST or isinstance(error, _LEAVES):
        return
    if future is not None:
        setattr(future, _NUMBER, number)
    report(error, owner, number if future is not None else 0)


def _note_retrieved(future: Future[Any]) -> None:
    number, report = future.__dict__.pop(_NUMBER, 0), _on_retrieved
    if number and report is not None:
        report(number)


@functools.cache
def install() -> None:
    """Install the hooks, once for a process and its forks."""
    hook, keep, handle = threading.excepthook, Future.set_exception, asyncio.BaseEventLoop.call_exception_handler
    result_of, exception_of = Future.result, Future.exception

    def ended(args: Any) -> None:
        if args.exc_value is not None:
            _note(args.exc_value, f"thread {args.thread.name if args.thread is not None else '?'}")
        hook(args)

    def kept(self: Future[Any], exception: BaseException | None) -> None:
        if exception is not None:
            _note(exception, f"thread {threading.current_thread().name}", self)
        keep(self, exception)

    def result(self: Future[Any], timeout: float | None = None) -> Any:
        __tracebackhide__ = True
        try:
            return result_of(self, timeout)
        finally:
            _note_retrieved(self)

    def exception_(self: Future[Any], timeout: float | None = None) -> BaseException | None:
        found = exception_of(self, timeout)
        _note_retrieved(self)
        return found

    def handled(self: asyncio.BaseEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, BaseException):
            _note(error, "an asyncio task")
        handle(self, context)

    threading.excepthook = ended
    Future.set_exception = kept  # type: ignore[method-assign]
    Future.result = result  # type: ignore[method-assign]
    Future.exception = exception_  # type: ignore[method-assign]
    asyncio.BaseEventLoop.call_exception_handler = handled  # type: ignore[method-assign]
