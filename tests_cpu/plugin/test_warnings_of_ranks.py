"""A rank leaves behind what would keep its process from ending elsewhere: its test gets a warning."""

from __future__ import annotations

import pytest

from pytest_nsa.testing import run_example

LEAVES = """
import threading
from concurrent.futures import ThreadPoolExecutor

@world_size(2)
def test_leaves_a_thread(group):
    if group.rank == 1:
        threading.Thread(target=threading.Event().wait, name="uploader").start()

@world_size(2)
def test_leaves_idle_and_daemon_threads(group):
    pool = ThreadPoolExecutor(2)
    assert pool.submit(int, "1").result() == 1
    threading.Thread(target=threading.Event().wait, daemon=True).start()
"""


def test_a_thread_that_is_no_daemon_is_reported(pytester: pytest.Pytester) -> None:
    result = run_example(pytester, LEAVES)
    assert result.outcomes == {"passed": 2, "warnings": 1}
    assert "rank 1 left the thread uploader at" in result.stdout
    assert "it is no daemon: a process of torchrun would wait for it" in " ".join(result.stdout.split())


def test_what_would_wait_at_exit_under_torchrun_is_a_warning(pytester: pytest.Pytester) -> None:
    """Ranks end without running it; nothing is reported of handlers and finalizers that call no collective."""
    source = """
    import atexit, functools, multiprocessing

    def say_goodbye(text): print(text)
    def meet(): dist.barrier()
    def stop(pipe): pipe.send(functools.reduce(max, [1, 2]))

    class Pool:
        def __del__(self): dist.barrier()

    class Quiet:
        def __del__(self): pass

    KEPT = []

    @world_size(2)
    def test_leaves(group):
        atexit.register(say_goodbye, "bye")
        atexit.register(stop, multiprocessing.Pipe()[1])
        atexit.register(functools.partial(meet))
        if group.rank == 1:
            KEPT.append((Pool(), Quiet()))

    @world_size(2)
    def test_takes_back(group):
        atexit.register(meet)
        atexit.unregister(meet)
    """
    result = run_example(pytester, source)
    assert result.outcomes["passed"] == 2
    assert "rank 0 left the exit handler meet at" in result.stdout
    assert "which calls barrier: a process of torchrun would wait in it for others" in result.stdout
    assert "rank 1 left the finalizer of Pool at" in result.stdout
    assert result.outcomes["warnings"] == 3
    assert "Quiet" not in result.stdout
    assert "say_goodbye" not in result.stdout
    assert "stop" not in result.stdout
