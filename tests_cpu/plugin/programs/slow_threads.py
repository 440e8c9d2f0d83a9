"""Timers, executors, pools and threads that act for a main thread."""

# slow
# options: -o timeout=40
import asyncio
import queue
import subprocess
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context

import pytest
import torch
import torch.distributed as dist

held = threading.Lock()
WAITS = {
    "event": lambda: threading.Event().wait(3),
    "queue": lambda: take_for_a_while(),
    "lock": lambda: held.acquire(timeout=3),
    "loop": lambda: asyncio.run(asyncio.sleep(3)),
    "command": lambda: subprocess.run(["sleep", "3"], check=True),
    "sleep": lambda: time.sleep(3),
}


def take_for_a_while():
    with pytest.raises(queue.Empty):
        queue.Queue().get(timeout=3)


def work(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(10_000))


@pytest.mark.parametrize("name", [*sorted(WAITS), "timer"])
def test_a_thread_waits_with_a_limit_and_sends(group, name):  # -> passes
    held.acquire(blocking=False)

    def send():
        if name != "timer":
            WAITS[name]()
        dist.send(torch.ones(1), 0)

    if group.rank == 1:
        later = threading.Timer(3, send) if name == "timer" else threading.Thread(target=send)
        later.start()
        dist.recv(torch.empty(1), 0)
    else:
        dist.recv(torch.empty(1), 1)
        dist.send(torch.ones(1), 1)


def test_an_executor_writes_and_meets_the_others(group):  # -> passes
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


def test_a_pool_computes(group):  # -> passes
    if group.rank == 0:
        with ProcessPoolExecutor(1, mp_context=get_context("fork")) as executor:
            executor.submit(work, 6).result()
    dist.barrier()


def test_a_thread_multiplies(group):  # -> passes
    def multiply():
        a, end = torch.randn(500, 500), time.monotonic() + 6
        while time.monotonic() < end:
            a = torch.tanh(a @ a)

    if group.rank == 0:
        thread = threading.Thread(target=multiply)
        thread.start()
        thread.join()
    dist.barrier()
