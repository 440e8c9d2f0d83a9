"""RPC, stores and threads: programs as users write them, each with a fault after a real bug report.

Written by hands that had not read the rules. A verdict must name a line that is marked with HERE.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import time

import torch
import torch.distributed as dist
import torch.nn as nn

from tests_cpu.faults.planting import planted


def where():
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def mlp(width=16, depth=2):
    return nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())])


# rpc, stores


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


@planted("lock_deadlock", [1], n=3, marked=True)
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


class BestModelBoard:
    def __init__(self, path, rank, world):
        self.rank, self.store = rank, dist.FileStore(str(path / "board"), world)
        self.offset = 0

    def exchange(self, epoch, score):
        if self.rank == 0:
            self.store.set(f"best/{epoch + self.offset}", f"{score:.4f}")  # HERE
            return score
        return float(self.store.get(f"best/{epoch}"))  # HERE


@planted("missing_collective", [0], n=4, marked=True)
def test_store_key_off_by_one(tmp_path):
    """After its resume rank 0 writes the score under the key of the next epoch, and the others wait for a key that no rank sets."""
    rank, world = where()
    board = BestModelBoard(tmp_path, rank, world)
    for epoch in range(6):
        score = torch.rand(1)
        dist.all_reduce(score)  # HERE
        if epoch == 4 and rank == 0:
            board.offset = 1
        board.exchange(epoch, score.item())  # HERE
    dist.barrier()


class StoreBarrier:
    def __init__(self, path, world):
        self.store, self.world, self.round = dist.FileStore(str(path / "sync"), world), world, 0

    def wait(self):
        self.round += 1
        if self.store.add(f"in/{self.round}", 1) == self.world:
            self.store.set(f"go/{self.round}", "1")  # HERE
        self.store.wait([f"go/{self.round}"])  # HERE


@planted("missing_collective", [2], n=3, marked=True)
def test_store_barrier_no_shard(tmp_path):
    """Rank 2 has no shard to write and returns before the store's barrier; the others wait there for its arrival."""
    rank, world = where()
    barrier = StoreBarrier(tmp_path, world)

    def export(epoch):
        rows = [] if rank == 2 and epoch == 3 else list(range(4))
        if not rows:
            return  # HERE
        (tmp_path / f"shard-{rank}-{epoch}").write_text(str(rows))
        barrier.wait()  # HERE

    for epoch in range(5):
        dist.all_reduce(torch.ones(2))  # HERE
        export(epoch)
    dist.barrier()


@planted("init_timeout", [3], n=4, marked=True)
def test_reinit_stale_generation(tmp_path):
    """After the restart of the group rank 3 still has the old generation's rendezvous file, so neither it nor the others form a group."""
    rank, world = where()
    dist.all_reduce(torch.ones(2))
    dist.barrier()
    generation = 0
    membership_event_seen = rank != 3
    dist.destroy_process_group()
    generation += int(membership_event_seen)
    path = tmp_path / f"rendezvous-{generation}"
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)  # HERE
    dist.all_reduce(torch.ones(2))


# threads


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


@planted("collective_mismatch", [1], n=3, marked=True)
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


@planted("rank_exception", [2], n=3, marked=True, reason="Thread-2 (fill)")
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


class StallWatchdog(threading.Thread):
    def __init__(self, patience):
        super().__init__(daemon=True)
        self.patience, self.beat = patience, time.monotonic()
        self.start()

    def run(self):
        while True:
            time.sleep(0.1)
            if time.monotonic() - self.beat > self.patience:
                os.kill(os.getpid(), signal.SIGKILL)  # HERE


@planted("rank_died", [3], n=4, marked=True)
def test_watchdog_kills_rank():
    """Rank 3's own watchdog takes a slow validation for a hang and kills its process, while the others wait for it."""
    rank, _ = where()
    dog = StallWatchdog(patience=1.5 if rank == 3 else 900)
    for step in range(6):
        dog.beat = time.monotonic()
        if step == 4 and rank == 3:
            end = time.monotonic() + 60
            while time.monotonic() < end:
                torch.randn(128, 128) @ torch.randn(128, 128)  # HERE
        dist.all_reduce(torch.ones(8))  # HERE
