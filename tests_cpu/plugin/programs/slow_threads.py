"""Timers, executors, pools and threads that act for a main thread, and ranks with more threads than a dump has."""

# slow
# options: -o timeout=40
import asyncio
import fcntl
import queue
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context

import pytest
import torch
import torch.distributed as dist

from pytest_nsa import world_size

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


@world_size(2)
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


@world_size(2)
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


@world_size(2)
def test_a_pool_computes(group):  # -> passes
    if group.rank == 0:
        with ProcessPoolExecutor(1, mp_context=get_context("fork")) as executor:
            executor.submit(work, 6).result()
    dist.barrier()


@world_size(2)
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


def start_idle(count):
    ends = threading.Event()
    for _ in range(count):
        threading.Thread(target=ends.wait, daemon=True).start()


@world_size(2)
@pytest.mark.timeout(5)
def test_both_lock_a_file(group, tmp_path):  # -> lock_deadlock ?: which rank
    with (tmp_path / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        dist.barrier()


@pytest.mark.timeout(8)
@world_size(2)
def test_sleeps_beside_many_threads(group):  # -> sleeping 1 here
    start_idle(150)
    if group.rank == 1:
        time.sleep(1000)  # HERE
    dist.barrier()


@pytest.mark.timeout(8)
@world_size(2)
def test_holds_the_gil_beside_many_threads(group):  # -> gil_held 1 here
    start_idle(150)
    if group.rank == 1:
        re.match(r"(a+)+b", "a" * 40)  # HERE
    dist.barrier()


def descend(depth):
    # Fast until the stack is much deeper than a dump, then slow enough for the machine's memory.
    return descend(depth + 1) if depth < 2_000_000 else descend(depth + bool(sum(range(3000))))


@pytest.mark.timeout(12)
@world_size(2)
def test_descends_without_an_end(group):  # -> infinite_loop 1
    sys.setrecursionlimit(10**9)
    if group.rank == 1:
        descend(0)
    dist.barrier()
