"""Threads of a rank that work, wait or call for its main thread, and what a rank that is done first leaves to the others."""

# options: -o timeout=30 -o ranks_hang_after=4 -p xdist -n 3
import asyncio
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def work(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(10_000))


def test_a_thread_reduces_over_another_group(group):  # -> passes
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


# What a thread runs without a frame of the program's has the line that gave it to the thread.
def test_in_asyncio(group):  # -> ? ? here
    async def meet():
        if group.rank == 0:
            await asyncio.to_thread(dist.barrier)  # HERE

    asyncio.run(meet())


def test_in_a_thread(group):  # -> ? ? here
    thread = threading.Thread(target=dist.barrier)
    if group.rank == 0:
        thread.start()  # HERE
        thread.join()
    dist.all_reduce(torch.ones(2))


def test_an_executor_sleeps(group):  # -> sleeping 1 here
    async def pause():
        if group.rank == 1:
            await asyncio.get_running_loop().run_in_executor(None, time.sleep, 1000)  # HERE

    asyncio.run(pause())
    dist.barrier()


# A rank ends after the threads that another one may need; one that waits in vain for it gets its error.
def test_a_thread_sends_later(group):  # -> passes
    def send_later():
        time.sleep(3)
        dist.send(torch.ones(1), 1)

    if group.rank == 0:
        threading.Thread(target=send_later).start()
    else:
        dist.recv(torch.ones(1), 0)


def test_autograd_waits(group):  # -> passes
    model = DistributedDataParallel(nn.Linear(8, 8))
    loss = model(torch.randn(4, 8)).sum()
    if group.rank == 0:
        with pytest.raises(RuntimeError):
            loss.backward()


def test_it_polls_a_thread_and_a_future_wait(group):  # -> passes
    dist.barrier()
    if group.rank == 0:
        handle = dist.all_reduce(torch.ones(1), async_op=True)
        while not handle.is_completed():
            time.sleep(0.01)
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()
        with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError):
            pool.submit(dist.all_reduce, torch.ones(1)).result()


def test_one_raises_before_its_backward(group):  # -> rank_exception 1 certain
    model = DistributedDataParallel(nn.Linear(8, 8))
    assert group.rank == 0
    model(torch.randn(4, 8)).sum().backward()


def test_a_rank_works_through_small_modules(ddp, group):  # -> passes
    model = ddp.wrap(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    end = time.monotonic() + 5
    with torch.no_grad():
        while group.rank == 0 and time.monotonic() < end:
            model.module(torch.ones(1, 2))
    dist.barrier()
