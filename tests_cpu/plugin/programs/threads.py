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

from pytest_nsa import world_size


def work(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(10_000))


@world_size(2)
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


@world_size(2)
def test_threads_that_wait_for_work_keep_no_hang_alive(group):  # -> skipped_collective 1 certain
    side, steps = dist.new_group(), queue.Queue()
    threading.Thread(target=steps.get, daemon=True).start()
    threading.Thread(target=lambda: [steps.get() for _ in range(9)], daemon=True).start()
    for step in range(3):
        if not (step == 1 and group.rank == 1):
            dist.all_reduce(torch.ones(1), group=side)
        dist.all_reduce(torch.ones(4))


# What a thread runs without a frame of the program's has the line that gave it to the thread.
@world_size(2)
def test_in_asyncio(group):  # -> ? ? here
    async def meet():
        if group.rank == 0:
            await asyncio.to_thread(dist.barrier)  # HERE

    asyncio.run(meet())


@world_size(2)
def test_in_a_pool(group):  # -> ? ? here
    with ThreadPoolExecutor(1) as pool:
        if group.rank == 0:
            pool.submit(dist.all_reduce, torch.ones(2)).result()  # HERE


@world_size(2)
def test_in_a_thread(group):  # -> ? ? here
    thread = threading.Thread(target=dist.barrier)
    if group.rank == 0:
        thread.start()  # HERE
        thread.join()
    dist.all_reduce(torch.ones(2))


@world_size(2)
def test_an_executor_sleeps(group):  # -> sleeping 1 here
    async def pause():
        if group.rank == 1:
            await asyncio.get_running_loop().run_in_executor(None, time.sleep, 1000)  # HERE

    asyncio.run(pause())
    dist.barrier()


def write():
    time.sleep(1000)


async def save():
    await asyncio.get_running_loop().run_in_executor(None, write)


@world_size(2)
def test_an_asyncio_loop_waits_for_a_thread(group):  # -> io_stuck 1: in asyncio's loop for a thread of its executor
    if group.rank == 1:
        asyncio.run(save())
    dist.barrier()


@world_size(2)
def test_a_thread_ended_without_a_sample(group):  # -> sleeping 1: no other thread
    found = []
    if group.rank == 1:
        collector = threading.Thread(target=lambda: None)
        collector.start()
        collector.join()
        while not found:
            time.sleep(0.05)
    dist.barrier()


# A rank ends after the threads that another one may need; one that waits in vain for it gets its error.
@world_size(2)
def test_a_thread_sends_later(group):  # -> passes
    def send_later():
        time.sleep(3)
        dist.send(torch.ones(1), 1)

    if group.rank == 0:
        threading.Thread(target=send_later).start()
    else:
        dist.recv(torch.ones(1), 0)


@world_size(2)
@pytest.mark.timeout(5)
def test_a_thread_never_sends(group):  # -> lock_deadlock 0 here
    def send_then():
        threading.Event().wait()  # HERE
        dist.send(torch.ones(1), 1)

    if group.rank == 0:
        threading.Thread(target=send_then).start()
    else:
        dist.recv(torch.ones(1), 0)


@world_size(2)
def test_autograd_waits(group):  # -> passes
    model = DistributedDataParallel(nn.Linear(8, 8))
    loss = model(torch.randn(4, 8)).sum()
    if group.rank == 0:
        with pytest.raises(RuntimeError):
            loss.backward()


@world_size(2)
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


@world_size(2)
def test_one_raises_before_its_backward(group):  # -> rank_exception 1 certain
    model = DistributedDataParallel(nn.Linear(8, 8))
    assert group.rank == 0
    model(torch.randn(4, 8)).sum().backward()


@world_size(2)
def test_a_batch_less(group):  # -> FAIL skipped_collective 1
    model = DistributedDataParallel(nn.Linear(4, 1))
    for _batch in range(4 - group.rank):
        model(torch.ones(2, 4)).sum().backward()


@world_size(2)
def test_a_rank_works_through_small_modules(ddp, group):  # -> passes
    model = ddp.wrap(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    end = time.monotonic() + 5
    with torch.no_grad():
        while group.rank == 0 and time.monotonic() < end:
            model.module(torch.ones(1, 2))
    dist.barrier()
