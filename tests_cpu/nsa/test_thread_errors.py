"""Threads: what they raise is recorded, and, of a future, that somebody asked; which ones would keep a process from ending."""

import asyncio
import gc
import multiprocessing
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor

import pytest

from nsa.trace.stall.thread_errors import MOST, forget_thread_errors, report_thread_errors
from nsa.trace.stall.threads import lasting_threads


class Recorded:
    """What was recorded: (exception, whose, future), and the futures that were asked."""

    def __init__(self) -> None:
        self.raised: list[tuple[str, str, int]] = []
        self.retrieved: list[int] = []


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    recorded = Recorded()
    report_thread_errors(
        lambda error, owner, n: recorded.raised.append((repr(error), owner, n)), recorded.retrieved.append
    )
    yield recorded
    forget_thread_errors()


def fail() -> None:
    raise ValueError("bad shard")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_raises_is_told(recorded: Recorded) -> None:
    thread = threading.Thread(target=fail, name="loader")
    thread.start()
    thread.join()
    assert recorded.raised == [("ValueError('bad shard')", "thread loader", 0)]


def test_a_future_is_told_and_then_that_it_was_asked(recorded: Recorded) -> None:
    with ThreadPoolExecutor(1, thread_name_prefix="saver") as pool:
        future = pool.submit(fail)
    ((error, owner, number),) = recorded.raised
    assert (error, owner) == ("ValueError('bad shard')", "thread saver_0")
    assert number > 0
    assert recorded.retrieved == []
    with pytest.raises(ValueError, match="bad shard"):
        future.result()
    assert recorded.retrieved == [number]


def test_a_future_whose_exception_a_callback_looks_at_was_asked(recorded: Recorded) -> None:
    future: Future[None] = Future()
    future.add_done_callback(lambda f: f.exception())
    future.set_exception(OSError("disk full"))
    assert recorded.retrieved == [recorded.raised[0][2]]


def test_a_task_that_nobody_awaits_is_told_when_it_goes(recorded: Recorded) -> None:
    async def failing() -> None:
        fail()

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        task = asyncio.create_task(failing())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        del task
        gc.collect()

    asyncio.run(main())
    assert recorded.raised == [("ValueError('bad shard')", "an asyncio task", 0)]


def test_a_pool_that_fails_for_ever_fills_no_disk(recorded: Recorded) -> None:
    for _ in range(MOST + 50):
        Future[None]().set_exception(OSError("again"))
    assert len(recorded.raised) == MOST


def test_the_manager_of_a_pool_lasts_while_work_is_pending() -> None:
    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork"))
    assert pool.submit(int, "1").result() == 1
    manager = pool._executor_manager_thread
    while manager.pending_work_items:  # it removes an item after the result is set
        time.sleep(0.001)
    assert manager not in lasting_threads()
    pool.submit(time.sleep, 1000)
    assert manager in lasting_threads()
    for process in pool._processes.values():
        process.kill()
    manager.join()
