"""Locks, semaphores and queues on which a rank is blocked."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import queue
import signal
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from pytest_nsa.fixtures import DDP, FSDP, Group
from tests_cpu.faults.planting import AT, Net, net, planted, train


@planted(
    "lock_deadlock", [2], n=3, marked=True, reason="holds itself", family="lock", origin="public reports 2026-11-25"
)
def test_a_lock_on_a_file_is_taken_twice(group):
    path = os.path.join(tempfile.gettempdir(), f"build-{os.getppid()}.lock")

    def locked(function):
        file = os.open(path, os.O_CREAT | os.O_RDWR)
        fcntl.flock(file, fcntl.LOCK_EX)  # HERE
        function()
        os.close(file)

    def build():
        if group.rank == 2:
            locked(lambda: None)  # HERE

    dist.barrier()
    if group.rank != 2:
        time.sleep(0.5)
    locked(build)
    dist.barrier()


def at(group: Group, culprit: int, fault: Callable[[], Any]) -> None:
    """Six rounds of an all_reduce; in round AT, rank ``culprit`` calls ``fault()``."""
    for step in range(6):
        if group.rank == culprit and step == AT:
            fault()
        dist.all_reduce(torch.ones(2))


@planted("lock_deadlock", [1], where="test_planted.py", family="lock", origin="first corpus")
def test_a_lock_that_is_held_already(group: Group) -> None:
    lock = threading.Lock()

    def fault() -> None:
        with lock, lock:
            pass

    at(group, 1, fault)


class LockedBackward(torch.autograd.Function):
    """Waits in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, lock: Any) -> torch.Tensor:
        ctx.lock = lock
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        with ctx.lock:
            return gradients[0], None


@planted("lock_deadlock", [0], family="lock", origin="first corpus")
def test_a_lock_in_backward(ddp: DDP) -> None:
    lock = threading.Lock()

    class Locked(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return LockedBackward.apply(x, lock)

    model = ddp.wrap(nn.Sequential(nn.Linear(8, 8), Locked(), nn.Linear(8, 1)))
    train(model, ddp.rank, culprit=0, before=lock.acquire)


@planted("lock_deadlock", [2], n=4, reason="an item that no thread has put", family="lock", origin="first corpus")
def test_an_empty_queue(group: Group) -> None:
    at(group, 2, queue.Queue().get)


@planted("lock_deadlock", [1], family="lock", origin="first corpus")
def test_two_threads_and_two_locks(group: Group) -> None:
    def fault() -> None:
        first, second, both = threading.Lock(), threading.Lock(), threading.Barrier(2)

        def take(a: Any, b: Any) -> None:
            with a:
                both.wait()
                with b:
                    pass

        threading.Thread(target=take, args=(second, first), daemon=True).start()
        take(first, second)

    at(group, 1, fault)


def train_with(ddp: DDP, culprit: int, *, forward: Any = None, backward: Any = None, block: int = 1) -> None:
    """Training in which a block calls ``forward`` or ``backward`` from step AT on."""
    model = ddp.wrap(net())
    inner = model.module
    assert isinstance(inner, Net)

    def plant() -> None:
        inner.blocks[block].fault = forward or inner.blocks[block].fault
        inner.blocks[block].in_backward = backward

    train(model, ddp.rank, culprit=culprit, before=plant)


@planted("lock_deadlock", [1], reason="in a gradient hook", family="lock", origin="first corpus")
def test_a_lock_in_a_gradient_hook(ddp: DDP) -> None:
    lock = threading.Lock()
    lock.acquire()
    train_with(ddp, 1, backward=lock.acquire)


def where():
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


@contextlib.contextmanager
def cache_lock(path):
    with open(path, "a") as f:
        fcntl.flock(f, fcntl.LOCK_EX)  # HERE
        yield
        fcntl.flock(f, fcntl.LOCK_UN)


@planted("lock_deadlock", [1], n=4, marked=True, family="lock", origin="bug reports 2026-11-23")
def test_flock_around_barrier(tmp_path):
    """Rank 1 builds the cache first and enters the barrier with the file lock still held; the others want the lock before that barrier."""
    rank, _ = where()
    dist.barrier()
    if rank != 1:
        while not (tmp_path / "building").exists():
            time.sleep(0.02)
    with cache_lock(tmp_path / "cache.lock"):  # HERE
        if not (tmp_path / "cache.pt").exists():
            (tmp_path / "building").touch()
            torch.save(torch.arange(100), tmp_path / "cache.pt")
        dist.barrier()  # HERE
    torch.load(tmp_path / "cache.pt")


class RunState:
    def __init__(self):
        self.lock, self.history, self.preempted = threading.Lock(), [], False
        signal.signal(signal.SIGUSR2, self.on_preempt)

    def on_preempt(self, signum, frame):
        with self.lock:  # HERE
            self.preempted = True

    def record(self, step, loss, notice=None):
        with self.lock:
            self.history.append((step, loss))
            if notice is not None:
                notice()  # HERE


@planted("lock_deadlock", [0], n=3, marked=True, family="lock", origin="bug reports 2026-11-23")
def test_preempt_handler_lock():
    """The preemption signal reaches rank 0 while it holds the lock of its state, and the handler wants the same lock in the same thread."""
    rank, world = where()
    state = RunState()
    for step in range(8):
        loss = torch.rand(1)
        dist.all_reduce(loss)
        scheduler = (lambda: os.kill(os.getpid(), signal.SIGUSR2)) if rank == 0 and step == 5 else None
        state.record(step, loss.item() / world, scheduler)  # HERE


class RunTable:
    def __init__(self, path):
        self.db = sqlite3.connect(path, timeout=3600, isolation_level=None)
        self.db.execute("create table if not exists runs (rank int, epoch int, loss real)")

    def add(self, rank, epoch, loss, commit=True):
        self.db.execute("begin immediate")  # HERE
        self.db.execute("insert into runs values (?, ?, ?)", (rank, epoch, loss))
        if commit:
            self.db.execute("commit")


@planted("lock_deadlock", [1], n=3, marked=True, family="lock", origin="bug reports 2026-11-23")
def test_sqlite_open_transaction(tmp_path):
    """Rank 1 leaves its transaction open (a commit too few) and goes into the reduction; the others wait for the data base's lock."""
    rank, world = where()
    table = RunTable(tmp_path / "runs.db")
    for epoch in range(4):
        loss = torch.rand(1)
        dist.all_reduce(loss)  # HERE
        for turn in (1, 0, 2):
            if turn == rank:
                table.add(rank, epoch, loss.item() / world, commit=not (rank == 1 and epoch == 2))  # HERE
            if turn == 1:
                dist.barrier()


@planted("lock_deadlock", [0], family="lock", origin="first corpus")
def test_fsdp_lock_in_forward(fsdp: FSDP) -> None:
    import threading

    whole = net()
    model = fsdp.wrap(whole)

    def plant() -> None:
        lock = threading.Lock()
        lock.acquire()
        whole.blocks[1].fault = lock.acquire  # type: ignore[assignment]

    train(model, fsdp.rank, culprit=0, before=plant)


def ranks():
    return dist.get_rank(), dist.get_world_size()


class MetricClient:
    """A metrics client with a synchronous front."""

    def __init__(self, loop):
        self.loop, self.sent = loop, 0

    async def _post(self, payload):
        await asyncio.sleep(0.01)
        self.sent += len(payload)

    def post(self, payload):
        return asyncio.run_coroutine_threadsafe(self._post(payload), self.loop).result()  # HERE


async def stream(rank, client):
    total = 0.0
    for step in range(8):
        await asyncio.sleep(0.02)
        loss = float(torch.rand(16).sum())
        if rank == 2 and step == 5:
            client.post({"slow_step": step})  # HERE
        else:
            await client._post({"loss": loss})
        total += loss
    return total


@planted("lock_deadlock", [2], n=3, marked=True, family="lock", origin="bug reports 2026-11-23")
def test_sync_call_inside_event_loop():
    """Rank 2 calls the synchronous front of the metrics client from within the event loop, and waits for a future that only this loop could complete."""
    rank, _ = ranks()
    loop = asyncio.new_event_loop()
    x = torch.ones(2)
    dist.all_reduce(x)
    total = loop.run_until_complete(stream(rank, MetricClient(loop)))  # HERE
    t = torch.tensor([total])
    dist.all_reduce(t)
    loop.close()


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


class Vocabulary:
    def __init__(self, folder) -> None:
        self.path = folder / "vocabulary.json"

    def load(self) -> dict[str, int]:
        with locked(self.path.with_suffix(".lock")):  # HERE
            if not self.path.exists():
                self.path.write_text(json.dumps({word: i for i, word in enumerate(["a", "b", "c", "d"])}))
            dist.barrier()  # HERE
            return json.loads(self.path.read_text())


@planted("lock_deadlock", [2], n=3, marked=True, family="lock", origin="huggingface/datasets#547")
def test_vocabulary_is_built_once(group, tmp_path):
    dist.barrier()
    time.sleep(0.8 * ((group.rank + 1) % group.world_size))  # spread the load on the file server; rank 2 is first
    words = Vocabulary(tmp_path).load()  # HERE
    assert len(words) == 4
    dist.barrier()


def mlp(width=16, depth=2):
    return nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())])


class LockedWriter(dcp.FileSystemWriter):
    lock = threading.Lock()

    def write_data(self, plan, planner):
        with self.lock:  # HERE
            return super().write_data(plan, planner)


@planted("lock_deadlock", [2], n=3, marked=True, family="lock", origin="bug reports 2026-11-23")
def test_async_save_under_lock(tmp_path):
    """Rank 2 waits for the async save while it holds the lock that the saving thread's writer needs; the others' saves wait for rank 2."""
    rank, _ = where()
    torch.manual_seed(0)
    model, saving, pending = mlp(), dist.new_group(), None
    for step in range(6):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
            dist.all_reduce(p.grad)
        quota_low = rank == 2
        if step == 3:
            if quota_low:
                LockedWriter.lock.acquire()  # HERE
            writer = LockedWriter(str(tmp_path / "ck"))
            pending = dcp.async_save({"model": model.state_dict()}, storage_writer=writer, process_group=saving)
        if step == 4:
            pending.result()  # HERE
            if quota_low:
                LockedWriter.lock.release()
    dist.barrier()


@planted(
    "lock_deadlock",
    [0],
    n=3,
    marked=True,
    reason="ranks 1 and 2 waits for a lock on",
    family="lock",
    origin="set 67-70",
)
def test_a_barrier_under_a_lock_on_a_file(group: Group) -> None:
    path = os.path.join(tempfile.gettempdir(), f"weights-{os.getppid()}.lock")
    if group.rank != 0:
        dist.recv(torch.empty(1), 0)
    file = os.open(path, os.O_CREAT | os.O_RDWR)
    fcntl.flock(file, fcntl.LOCK_EX)
    if group.rank == 0:
        for other in (1, 2):
            dist.send(torch.ones(1), other)
        dist.barrier()  # HERE
    fcntl.flock(file, fcntl.LOCK_UN)
    if group.rank != 0:
        dist.barrier()
