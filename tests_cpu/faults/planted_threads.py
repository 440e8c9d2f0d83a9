"""Threads, futures and tasks beside the main thread that raise: what they would have done is what the ranks wait for.

HERE marks the lines that a verdict may name.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from tests_cpu.faults.planting import AT, planted


@planted("rank_exception", [1], n=3, marked=True, reason="bad shard")
def test_a_loader_s_thread_raises(group):
    batches = queue.Queue(2)

    def fill():
        for step in range(8):
            if (group.rank, step) == (1, AT):
                raise ValueError("bad shard")  # HERE
            batches.put(torch.ones(2))

    threading.Thread(target=fill, daemon=True).start()
    for _ in range(8):
        dist.all_reduce(batches.get())


@planted("rank_exception", [0], n=3, marked=True, reason="disk full")
def test_nobody_asks_the_future_of_a_save(group):
    store = dist.distributed_c10d._get_default_store()

    def save(step):
        if group.rank == 0:
            if step == 2:
                raise OSError("disk full")  # HERE
            store.set(f"saved{step}", "1")

    with ThreadPoolExecutor(1) as pool:
        for step in range(4):
            pool.submit(save, step)
            if group.rank:
                store.wait([f"saved{step}"])
            dist.barrier()


@planted("rank_exception", [1], n=2, marked=True, reason="KeyError")
def test_a_task_that_reads_ahead_raises(group):
    async def read(tokens):
        for step in range(5):
            await asyncio.sleep(0.01)
            if (group.rank, step) == (1, AT):
                raise KeyError("token")  # HERE
            await tokens.put(step)

    async def train():
        tokens = asyncio.Queue()
        reader = asyncio.create_task(read(tokens))
        for _ in range(5):
            dist.all_reduce(torch.full((1,), float(await tokens.get())))
        await reader

    asyncio.run(train())


@planted("rank_exception", [2], n=3, marked=True, reason="invalid for input")
def test_a_thread_that_reduces_raises(group):
    others = dist.new_group([0, 1, 2])

    def reduce():
        for step in range(5):
            x = torch.ones(2)
            if (group.rank, step) == (2, AT):
                x = x.view(3)  # HERE
            dist.all_reduce(x, group=others)

    reducer = threading.Thread(target=reduce)
    reducer.start()
    reducer.join()
    dist.barrier()


@planted("skipped_collective", [1], n=3, marked=True)
def test_tries_that_failed_and_were_asked_are_no_reason(group):
    def read(number):
        if number % 2:
            raise OSError("again")
        return torch.ones(1)

    with ThreadPoolExecutor(1) as pool:
        for step in range(6):
            first = pool.submit(read, 2 * step + 1)
            x = pool.submit(read, 2 * step).result() if first.exception() else first.result()
            if (group.rank, step) != (1, 4):
                dist.all_reduce(x)  # HERE
