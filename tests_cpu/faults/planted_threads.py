"""Threads, futures and tasks next to the main thread: they raise, stall, or call collectives."""

from __future__ import annotations

import asyncio
import datetime
import json
import logging
import os
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from tests_cpu.faults.planting import AT, planted


class Engine:
    """Answers prompts in a task of its own, which ends where a prompt is too long: nobody looks at it."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[tuple[int, asyncio.Future[int]]] = asyncio.Queue()
        self.serving = asyncio.create_task(self.serve())

    async def serve(self) -> None:
        costs = {0: 1, 1: 2}
        while True:
            length, answer = await self.asked.get()
            answer.set_result(costs[length // 8])  # HERE

    async def generate(self, length: int) -> int:
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        await self.asked.put((length, answer))
        return await answer  # HERE


async def rollout(lengths: list[int]) -> int:
    engine = Engine()
    total = sum(await asyncio.gather(*(engine.generate(length) for length in lengths)))
    engine.serving.cancel()
    return total


@planted("rank_exception", [1], marked=True, reason="asyncio", family="raise", origin="unseen 2026-11-25")
def test_a_future_whose_task_has_ended(group):
    for step in range(5):
        lengths = [3, 9, 30] if (group.rank, step) == (1, AT) else [3, 9]
        dist.all_reduce(torch.tensor(float(asyncio.run(rollout(lengths)))))


def where():
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Prefetcher:
    def __init__(self, records, depth=2):
        self.queue = queue.Queue(depth)
        self.thread = threading.Thread(target=self.fill, args=(records,), daemon=True)
        self.thread.start()

    def fill(self, records):
        for line in records:
            self.queue.put(torch.tensor([float(v) for v in line.split(",")]))  # HERE

    def __iter__(self):
        return self

    def __next__(self):
        return self.queue.get()  # HERE


@planted(
    "rank_exception", [2], n=3, marked=True, reason="Thread-2 (fill)", family="raise", origin="bug reports 2026-11-23"
)
def test_prefetch_thread_died():
    """Rank 2's prefetch thread died of a malformed record, and its main thread waits for ever on the empty queue."""
    rank, _ = where()
    records = ["1,2,3,4"] * 10
    if rank == 2:
        records[5] = "1,2,,4"
    batches = iter(Prefetcher(records))
    weight = torch.ones(4)
    for step in range(10):
        x = next(batches)  # HERE
        grad = x * (weight @ x)
        dist.all_reduce(grad)
        weight -= 1e-3 * grad


@planted("rank_exception", [1], n=3, marked=True, reason="bad shard", family="raise", origin="threads")
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


@planted("rank_exception", [0], n=3, marked=True, reason="disk full", family="raise", origin="threads")
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


@planted("rank_exception", [1], n=2, marked=True, reason="KeyError", family="raise", origin="threads")
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


@planted("rank_exception", [2], n=3, marked=True, reason="invalid for input", family="raise", origin="threads")
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


class Reporter(threading.Thread):
    """Sums what it is told over all ranks, by the default group."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.told: queue.Queue[float] = queue.Queue()
        self.sums: queue.Queue[float] = queue.Queue()
        self.began = threading.Event()

    def run(self) -> None:
        while True:
            x = torch.tensor([self.told.get()])
            work = dist.all_reduce(x, async_op=True)  # HERE
            self.began.set()
            work.wait()
            self.sums.put(x.item())


@planted("collective_mismatch", [1], marked=True, reason="a race", family="swap", origin="unseen 2026-11-25")
def test_a_thread_that_reports_by_the_default_group(group):
    reporter, parts = Reporter(), [torch.empty(6) for _ in range(2)]
    reporter.start()
    for step in range(5):
        if (group.rank, step) == (1, AT):
            reporter.told.put(64.0)
            reporter.began.wait()
        dist.all_gather(parts, torch.ones(6))
        if (group.rank, step) == (0, AT):
            reporter.told.put(64.0)
    reporter.sums.get()


class MetricPusher(threading.Thread):
    def __init__(self, world):
        super().__init__(daemon=True)
        self.world, self.queue, self.done = world, queue.Queue(), threading.Event()
        self.start()

    def run(self):
        while True:
            value = self.queue.get()
            time.sleep(1.0)
            out = [torch.zeros(1) for _ in range(self.world)]
            dist.all_gather(out, value)  # HERE
            self.done.set()


@planted("collective_mismatch", [1], n=3, marked=True, reason="a race", family="swap", origin="bug reports 2026-11-23")
def test_metric_thread_order():
    """A side thread gathers metrics on the training's own group: on rank 1, slow in its data, it comes before the main thread's all_reduce, elsewhere after."""
    rank, world = where()
    pusher = MetricPusher(world)
    grad = torch.randn(64)
    for step in range(8):
        if step == 5:
            pusher.queue.put(torch.tensor([float(step)]))
        if step == 5 and rank == 1:
            end = time.monotonic() + 2.5
            while time.monotonic() < end:
                torch.randn(64, 64).svd()  # HERE
        dist.all_reduce(grad)  # HERE
        grad /= world
    pusher.done.wait()


class GroupReporter(threading.Thread):
    """Sums a number over the ranks from time to time, in the group that training uses."""

    def __init__(self, every):
        super().__init__(daemon=True)
        self.every, self.ends = every, threading.Event()

    def run(self):
        while not self.ends.wait(self.every):
            dist.all_reduce(torch.ones(3))  # HERE


@planted("collective_mismatch", [2], n=4, marked=True, reason="a race", family="swap", origin="unseen 2026-11-26")
def test_reports_from_a_thread_in_the_training_s_group(group):
    reporter = GroupReporter(0.3 + 0.3 * ((group.rank + 2) % 4))
    reporter.start()
    for _ in range(500):
        time.sleep(0.004)
        dist.all_reduce(torch.ones(3000))  # HERE
    reporter.ends.set()


@planted("collective_mismatch", [1], n=3, marked=True, reason="a race", family="swap", origin="unseen 2026-11-26")
def test_sizes_are_gathered_in_a_thread_and_one_comes_later(group):
    def save():
        time.sleep(0.8 if group.rank == 1 else 0)
        dist.all_reduce(torch.zeros(3, dtype=torch.int64))  # HERE

    thread = threading.Thread(target=save, daemon=True)
    for step in range(10):
        time.sleep(0.2)
        dist.all_reduce(torch.ones(48))  # HERE
        if step == 3:
            thread.start()
    thread.join()


class ParameterServer:
    lock = threading.Lock()
    ready = threading.Event()
    total = torch.zeros(4)

    @staticmethod
    def push(grad):
        with ParameterServer.lock:  # HERE
            ParameterServer.total += grad
            ParameterServer.ready.set()
        return ParameterServer.total.clone()


@planted("lock_deadlock", [1], n=3, marked=True, family="lock", origin="bug reports 2026-11-23")
def test_rpc_server_lock(tmp_path):
    """Rank 1, the server, waits for an update with its lock held, and the update needs that lock; the workers wait for its answer."""
    import torch.distributed.rpc as rpc

    rank, world = where()
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/rpc", num_worker_threads=8, rpc_timeout=0)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=world, rpc_backend_options=options)
    for _ in range(3):
        if rank != 1:
            rpc.rpc_sync("w1", ParameterServer.push, args=(torch.ones(4),))
        dist.barrier()
    if rank == 1:
        with ParameterServer.lock:
            ParameterServer.ready.clear()
            ParameterServer.total.zero_()
            dist.barrier()
            ParameterServer.ready.wait()  # HERE
    else:
        dist.barrier()
        rpc.rpc_sync("w1", ParameterServer.push, args=(torch.ones(4),))  # HERE
    rpc.shutdown()


log = logging.getLogger("trainer")


# A prefetching thread that dies of a record it cannot read, logs that, and never puts the end into its queue. The other
# ranks do not wait for ever: they are in a monitored barrier, which raises after four seconds.
class ShardPrefetcher:
    def __init__(self, records: list[str]) -> None:
        self.records = records
        self.ready: queue.Queue = queue.Queue(maxsize=2)
        self.thread = threading.Thread(target=self.fill, name="prefetch", daemon=True)
        self.thread.start()

    def fill(self) -> None:
        try:
            for record in self.records:
                self.ready.put(torch.tensor(json.loads(record)))  # HERE
            self.ready.put(None)
        except Exception:
            log.exception("prefetching failed")  # HERE

    def __iter__(self):
        while (item := self.ready.get()) is not None:  # HERE
            yield item


@planted("lock_deadlock", [2], n=3, marked=True, family="lock", origin="bug reports 2026-11-23")
def test_prefetching(group):
    records = [json.dumps([float(i), float(group.rank)]) for i in range(8)]
    if group.rank == 2:
        records[5] = records[5].rstrip("]")  # cut off in the copy to this node
    seen = 0
    for item in ShardPrefetcher(records):  # HERE
        seen += len(item)
        dist.monitored_barrier(timeout=datetime.timedelta(seconds=4))
    assert seen == 16


# A coroutine that was called and never awaited: nobody fills the queue that the main one awaits.
class AsyncShardReader:
    def __init__(self, shard: int, remote: bool) -> None:
        self.shard, self.remote = shard, remote
        self.lines: asyncio.Queue = asyncio.Queue(maxsize=4)

    async def fill(self) -> None:
        for i in range(6):
            await asyncio.sleep(0)
            await self.lines.put(10 * self.shard + i)
        await self.lines.put(None)

    async def read(self) -> list[int]:
        if self.remote:
            self.fill()  # HERE
        else:
            self.filling = asyncio.create_task(self.fill())
        lines = []
        while True:
            line = await self.lines.get()  # HERE
            if line is None:
                return lines
            lines.append(line)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@planted("lock_deadlock", [0], n=3, marked=True, family="lock", origin="bug reports 2026-11-23")
def test_async_shards(group):
    total = torch.zeros(1)
    for shard in range(4):
        reader = AsyncShardReader(shard, remote=group.rank == 0 and shard == 3)
        lines = asyncio.run(reader.read())  # HERE
        total[0] = len(lines)
        dist.all_reduce(total)
        assert total.item() == 18


@planted("skipped_collective", [1], n=3, marked=True, family="skip", origin="threads")
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


@planted("skipped_collective", [2], n=3, marked=True, family="skip", origin="review 2026-11-28")
def test_a_rank_skips_a_call_while_another_trains_in_a_thread_that_it_joins(group):
    def train():
        for step in range(6):
            dist.all_reduce(torch.ones(3))
            if (group.rank, step) != (2, 4):
                dist.all_reduce(torch.ones(5))  # HERE

    if group.rank == 0:
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    else:
        train()
