"""Main threads that wait while another thread of a rank, or a child process, works for them: no hang, and not announced."""

from __future__ import annotations

import subprocess

import pytest

from pytest_nsa.testing import HEADER, run_example
from tests_cpu.sockets import free_port
from tests_cpu.warm import WarmPython

AT_WORK = """
pytestmark = pytest.mark.timeout(40)


def work(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(10_000))

"""
ROUNDS = """
@world_size(2)
def test_a_thread_reduces_over_another_group(group):
    import queue

    side, steps = dist.new_group(), queue.Queue()

    def log():
        while (step := steps.get()) is not None:
            if step == 2:
                work(3)
            dist.all_reduce(torch.ones(1), group=side)

    if group.rank == 0:
        thread = threading.Thread(target=log)
        thread.start()
    for step in range(4):
        if group.rank == 0:
            steps.put(step)
        else:
            dist.all_reduce(torch.ones(1), group=side)
        dist.all_reduce(torch.ones(4))
    if group.rank == 0:
        steps.put(None)
        thread.join()
"""
MORE = """
@world_size(2)
@pytest.mark.parametrize("waits", ["in a timer", "in a sleep"])
def test_a_thread_sends_later(group, waits):
    def send():
        dist.send(torch.ones(1), 0)

    def sleep_and_send():
        time.sleep(3)
        send()

    if group.rank == 1:
        later = threading.Timer(3, send) if waits == "in a timer" else threading.Thread(target=sleep_and_send)
        later.start()
        dist.recv(torch.empty(1), 0)
    else:
        dist.recv(torch.empty(1), 1)
        dist.send(torch.ones(1), 1)


@world_size(2)
def test_an_executor_writes_and_meets_the_others(group):
    from concurrent.futures import ThreadPoolExecutor

    side = dist.new_group()

    def write():
        if group.rank == 0:
            work(3)
        dist.barrier(side)

    with ThreadPoolExecutor(1) as executor:
        written = executor.submit(write)
        if group.rank == 1:
            written.result()
        dist.all_reduce(torch.ones(1))
        written.result()


@world_size(2)
def test_a_pool_computes(group):
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    if group.rank == 0:
        with ProcessPoolExecutor(1, mp_context=get_context("fork")) as executor:
            executor.submit(work, 6).result()
    dist.barrier()


@world_size(2)
def test_a_thread_multiplies(group):
    def multiply():
        a, end = torch.randn(500, 500), time.monotonic() + 6
        while time.monotonic() < end:
            a = torch.tanh(a @ a)

    if group.rank == 0:
        thread = threading.Thread(target=multiply)
        thread.start()
        thread.join()
    dist.barrier()
"""


LIMITED = """
WAITS = {
    "event": lambda: threading.Event().wait(3),
    "queue": lambda: take_for_a_while(),
    "lock": lambda: held.acquire(timeout=3),
    "loop": lambda: asyncio.run(asyncio.sleep(3)),
    "command": lambda: subprocess.run(["sleep", "3"], check=True),
}


def take_for_a_while():
    with pytest.raises(queue.Empty):
        queue.Queue().get(timeout=3)


@world_size(2)
@pytest.mark.parametrize("name", sorted(WAITS))
def test_a_thread_waits_with_a_limit_and_sends(group, name):
    held.acquire(blocking=False)

    def send():
        WAITS[name]()
        dist.send(torch.ones(1), 0)

    if group.rank == 1:
        threading.Thread(target=send).start()
        dist.recv(torch.empty(1), 0)
    else:
        dist.recv(torch.empty(1), 1)
        dist.send(torch.ones(1), 1)
"""


def assert_silent(pytester: pytest.Pytester, source: str, passed: int) -> None:
    result = run_example(pytester, AT_WORK + source)
    assert result.outcomes == {"passed": passed}, result.stdout
    assert "waited for" not in result.stdout
    assert "wait in different" not in result.stdout


def test_a_thread_makes_the_call_that_the_main_one_left(pytester: pytest.Pytester) -> None:
    assert_silent(pytester, ROUNDS, 1)


@pytest.mark.slow
def test_timers_sleepers_executors_and_children_act_for_the_main_thread(pytester: pytest.Pytester) -> None:
    assert_silent(pytester, MORE, 5)


@pytest.mark.slow
def test_threads_act_after_a_wait_with_a_limit(pytester: pytest.Pytester) -> None:
    assert_silent(pytester, "import asyncio, queue, subprocess\n\nheld = threading.Lock()\n" + LIMITED, 5)


@pytest.mark.slow
def test_they_act_under_torchrun_too(warm: WarmPython, pytester: pytest.Pytester) -> None:
    (pytester.path / "test_example.py").write_text(HEADER + AT_WORK + ROUNDS + MORE)
    launcher = ("-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port", str(free_port()))
    session = ("-m", "pytest", "-p", "no:cacheprovider", "-rs")
    done = warm.call(*launcher, *session, cwd=pytester.path, stderr=subprocess.STDOUT, timeout=150, nursery=True)
    assert done.returncode == 0, done.stdout
    assert "6 passed" in done.stdout
    assert "waited for" not in done.stdout


def test_a_thread_that_waits_for_work_keeps_no_hang_alive(pytester: pytest.Pytester) -> None:
    """The rank's threads wait for items of a queue, into which nothing is put."""
    result = run_example(
        pytester,
        AT_WORK
        + """
@world_size(2)
def test_skips(group):
    import queue

    side, steps = dist.new_group(), queue.Queue()
    threading.Thread(target=steps.get, daemon=True).start()
    threading.Thread(target=lambda: [steps.get() for _ in range(9)], daemon=True).start()
    for step in range(3):
        if not (step == 1 and group.rank == 1):
            dist.all_reduce(torch.ones(1), group=side)
        dist.all_reduce(torch.ones(4))
""",
    )
    verdict = result.verdicts["test_skips"]
    assert (verdict.cause, verdict.ranks, verdict.certain) == ("skipped_collective", (1,), True)
    assert verdict.duration_s < 20
