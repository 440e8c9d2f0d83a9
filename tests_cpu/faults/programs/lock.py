"""Programs in which a lock, queue or thread is waited for."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import logging
import os
import queue
import select
import sqlite3
import tempfile
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pytest_nsa.fixtures import DDP, Group
from tests_cpu.faults.planting import Net, net, planted, train


@planted(2)
def test_two_write_to_a_database_in_wal_mode(group, tmp_path, faulty):
    """Each has a shared lock on the database's index, too."""
    table = sqlite3.connect(tmp_path / "cache.db", timeout=1000, isolation_level=None)
    if group.rank == 0:
        table.execute("pragma journal_mode=wal")
        table.execute("create table rows (key, value)")
    group.barrier()
    table.execute("select * from rows").fetchall()
    if group.rank == 0:
        if faulty:
            table.execute("begin immediate")
        table.execute("insert into rows values (1, 2)")
        group.barrier()
        group.barrier()  # HERE
        table.commit()
    else:
        group.barrier()
        table.execute("insert into rows values (2, 3)")  # HERE
        group.barrier()


class WaitsInBackward(torch.autograd.Function):
    """Return x; the backward waits for ``seconds``, in no call that a rule knows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        select.select([], [], [], ctx.seconds)
        return gradients[0], None


@planted(2)
def test_backward_waits_for_a_backward_in_another_thread(group: Group, faulty: bool) -> None:
    model = nn.Linear(4, 4)
    WaitsInBackward.apply(model(torch.ones(2, 4)), 1000 if faulty else 0).sum().backward()


# A barrier under a file lock: who comes first waits for the others inside, and they wait for the lock
# (huggingface/datasets PR 547 and ms-swift PR 5763 are about the locks of data sets that ranks share).
@contextlib.contextmanager
def locked(path):
    with open(path, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)  # HERE
        try:
            yield handle
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)


@planted(3, rank=2)
def test_a_lock_on_a_file_is_taken_twice(group, culprit):
    path = os.path.join(tempfile.gettempdir(), f"build-{os.getppid()}.lock")

    def locked(function):
        file = os.open(path, os.O_CREAT | os.O_RDWR)
        fcntl.flock(file, fcntl.LOCK_EX)  # HERE
        function()
        os.close(file)

    def build():
        if group.rank == culprit:
            locked(lambda: None)  # HERE

    dist.barrier()
    if group.rank != culprit:
        time.sleep(0.5)
    locked(build)
    dist.barrier()


def train_with(ddp: DDP, culprit: int, *, forward: Any = None, backward: Any = None, block: int = 1) -> None:
    """Training in which a block calls ``forward`` or ``backward`` from step AT on."""
    model = ddp.wrap(net())
    inner = model.module
    assert isinstance(inner, Net)

    def plant() -> None:
        inner.blocks[block].fault = forward or inner.blocks[block].fault
        inner.blocks[block].in_backward = backward

    train(model, ddp.rank, culprit=culprit, before=plant)


@planted(2, rank=1)
def test_a_lock_in_a_gradient_hook(ddp: DDP, culprit: int) -> None:
    lock = threading.Lock()
    lock.acquire()
    train_with(ddp, culprit, backward=lock.acquire)


class CreditStage:
    """Its reader takes a credit per message; the main thread gives it back."""

    def __init__(self, rank, parts):
        self.rank, self.inbox, self.credits = rank, queue.Queue(), threading.Semaphore(2)
        threading.Thread(target=self.read, args=(parts,), daemon=True).start()

    def read(self, parts):
        for part in range(parts if self.rank > 0 else 0):
            self.credits.acquire()  # HERE
            x = torch.empty(4)
            dist.recv(x, self.rank - 1, tag=part)
            self.inbox.put(x)

    def run(self, parts, culprit):
        for part in range(parts):
            x = self.inbox.get() if self.rank > 0 else torch.full((4,), float(part))  # HERE
            if self.rank < 3:
                dist.send(x, self.rank + 1, tag=part)
            if self.rank == culprit and part % 3 == 0:
                continue
            self.credits.release()


@planted(4, rank=2)
def test_credits_that_a_stage_does_not_give_back(group, culprit):
    """The stage behind it waits in a queue, too: for what its reader is to receive."""
    CreditStage(group.rank, 16).run(16, culprit)
    dist.barrier()


def where():
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


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


@planted(3, rank=1)
def test_rpc_server_lock(tmp_path, culprit):
    """Rank 1, the server, waits for an update with its lock held, and the update needs that lock; the workers wait for its answer."""
    import torch.distributed.rpc as rpc

    rank, world = where()
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/rpc", num_worker_threads=8, rpc_timeout=0)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=world, rpc_backend_options=options)
    for _ in range(3):
        if rank != culprit:
            rpc.rpc_sync("w1", ParameterServer.push, args=(torch.ones(4),))
        dist.barrier()
    if rank == culprit:
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


@planted(3, rank=2)
def test_prefetching(group, culprit):
    records = [json.dumps([float(i), float(group.rank)]) for i in range(8)]
    if group.rank == culprit:
        records[5] = records[5].rstrip("]")  # cut off in the copy to this node
    seen = 0
    for item in ShardPrefetcher(records):  # HERE
        seen += len(item)
        dist.monitored_barrier(timeout=datetime.timedelta(seconds=4))
    assert seen == 16


@planted(2)
def test_a_barrier_inside_a_file_s_lock(group, tmp_path, faulty):
    """Rank 0 waits in the barrier with the lock, and the library of rank 1 sleeps between its attempts to get it."""
    from filelock import FileLock

    dist.all_reduce(torch.ones(1))
    if group.rank == 1:
        while not (tmp_path / "prepared0.lock").exists():
            time.sleep(0.1)
    with FileLock(tmp_path / f"prepared{0 if faulty else group.rank}.lock"):
        dist.barrier()  # HERE
