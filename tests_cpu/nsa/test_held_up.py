"""What a stack does not show of a stalled thread: the exception that it handles, and what its asyncio loop waits for."""

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nsa.trace.stall.held_up import asyncio_tasks, handled_exception

Look = Callable[[], None]


def looked_at(runs: Callable[[Look], None], look: Callable[[int], Any]) -> Any:
    """Return what ``look`` finds, from another thread, of the one that ``runs`` when that calls its argument."""
    found: list[Any] = []

    def from_outside() -> None:
        ident = threading.get_ident()
        other = threading.Thread(target=lambda: found.append(look(ident)))
        other.start()
        other.join()

    runs(from_outside)
    return found[0]


def fail() -> None:
    raise KeyError("speech")


def in_finally(look: Look) -> None:
    with contextlib.suppress(KeyError):
        try:
            fail()
        finally:
            look()


class Session:
    def __init__(self, look: Look) -> None:
        self.look = look

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self.look()


def at_the_end_of_a_with(look: Look) -> None:
    with contextlib.suppress(KeyError), Session(look):
        fail()


@contextlib.contextmanager
def cleaned(look: Look) -> Iterator[None]:
    try:
        yield
    finally:
        look()


def in_a_generator_s_finally(look: Look) -> None:
    with contextlib.suppress(KeyError), cleaned(look):
        fail()


def line_of(function: Callable[..., Any], text: str) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if text in line)


@pytest.mark.parametrize(
    ("runs", "handler", "line"),
    [
        (in_finally, in_finally, "look()"),
        (at_the_end_of_a_with, at_the_end_of_a_with, "Session(look)"),
        (in_a_generator_s_finally, inspect.unwrap(cleaned), "look()"),
    ],
)
def test_an_exception_that_unwinds_is_told_with_its_line_and_its_handler_s(
    runs: Callable[[Look], None], handler: Callable[..., Any], line: str
) -> None:
    told = looked_at(runs, handled_exception)
    assert told["says"] == "KeyError: speech"
    assert told["at"] == f"{__file__}:{line_of(fail, 'raise')} in fail"
    assert told["in"] == f"{__file__}:{line_of(handler, line)} in {handler.__name__}"


def test_one_that_is_done_with_is_not_told() -> None:
    def after(look: Look) -> None:
        with contextlib.suppress(KeyError):
            fail()
        look()

    assert looked_at(after, handled_exception) == {}


def test_an_error_of_the_system_is_told_with_its_file(tmp_path: Path) -> None:
    def fails(look: Look) -> None:
        try:
            tmp_path.mkdir()
        except FileExistsError:
            look()

    assert looked_at(fails, handled_exception)["says"] == f"FileExistsError: File exists: {tmp_path}"


def test_a_secret_in_its_text_is_masked() -> None:
    def fails(look: Look) -> None:
        try:
            raise PermissionError("https://user:hunter2secret@host/data")
        except PermissionError:
            look()

    assert "hunter2secret" not in looked_at(fails, handled_exception)["says"]


async def awaits(future: asyncio.Future[None]) -> None:
    await future


def test_the_line_that_the_main_task_s_task_awaits_comes_first() -> None:
    def runs(look: Look) -> None:
        async def main() -> None:
            loop = asyncio.get_running_loop()
            idle, wanted = loop.create_future(), loop.create_future()
            beside = asyncio.create_task(awaits(idle))
            loop.call_later(0.05, lambda: (look(), wanted.set_result(None)))
            await asyncio.gather(awaits(wanted))
            beside.cancel()

        asyncio.run(main())

    told = looked_at(runs, asyncio_tasks)
    here = f"{__file__}:{line_of(awaits, 'await future')} in awaits"
    assert told["tasks"][0] == here
    assert told["tasks"].count(here) == 2  # the one beside as well
    assert told["files"] == 0


async def fails() -> None:
    fail()


def test_tasks_that_ended_with_an_exception_that_nobody_was_given_are_told() -> None:
    def runs(look: Look) -> None:
        async def main() -> None:
            lost, asked = asyncio.create_task(fails()), asyncio.create_task(fails())
            await asyncio.gather(asked, return_exceptions=True)
            look()
            assert lost.exception()

        asyncio.run(main())

    here = f"{__file__}:{line_of(fail, 'raise')} in fail"
    assert looked_at(runs, asyncio_tasks)["failed"] == [{"says": "KeyError: speech", "at": here}]


def test_a_thread_without_a_loop_has_no_tasks() -> None:
    assert looked_at(lambda look: look(), asyncio_tasks) == {}
