"""Programs as users write them in which nothing is wrong, however it looks (see healthy_pauses.py); written by hands that had not read the rules."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import queue
import signal
import sqlite3
import subprocess
import sys
import threading
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

from pytest_nsa import world_size


def where():
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def mlp(width=16, depth=2):
    return nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())])


def compute(seconds, size=96):
    """Local work that is bounded by the clock."""
    end, x = time.monotonic() + seconds, torch.randn(size, size)
    while time.monotonic() < end:
        x = torch.linalg.qr(x @ x.t() + torch.eye(size))[0]
    return x.sum()


@world_size(3)
def test_eval_alone_on_main():
    """DDP training; after each epoch rank 0 alone evaluates the inner module, with no collective, while the others wait in the barrier."""
    rank, _ = where()
    torch.manual_seed(0)
    model = DDP(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(2):
        for _ in range(10):
            model(torch.randn(8, 16)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0:
            end = time.monotonic() + 2.5
            model.eval()
            with torch.no_grad():
                while time.monotonic() < end:
                    model.module(torch.randn(64, 16))
            model.train()
        dist.barrier()


class SlowRecords(Dataset):
    def __init__(self, rank):
        self.rank = rank

    def __len__(self):
        return 24

    def __getitem__(self, i):
        if self.rank == 1:
            time.sleep(2.0 if i == 8 else 0.08)
        return torch.full((4,), float(i))


@world_size(2)
def test_loader_worker_stalls():
    """Rank 1's data loader worker has slow records and one very slow one; rank 0 waits in the reduction of each step."""
    rank, world = where()
    loader = DataLoader(SlowRecords(rank), batch_size=4, num_workers=1)
    weight = torch.ones(4)
    for epoch in range(2):
        for batch in loader:
            grad = batch.mean(0) * weight
            dist.all_reduce(grad)
            weight = weight - 1e-4 * grad / world
    assert weight.isfinite().all()


@world_size(4)
def test_flock_one_by_one(tmp_path):
    """Each rank builds its extension under one file lock, 1.3 s each, and releases it before the barrier."""
    rank, world = where()
    for _ in range(3):
        dist.all_reduce(torch.ones(4))
    with open(tmp_path / "build.lock", "a") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        try:
            compute(0.3)
            time.sleep(1.0)
            (tmp_path / f"ext-{rank}.so").write_bytes(b"\x7fELF")
        finally:
            fcntl.flock(f, fcntl.LOCK_UN)
    dist.barrier()
    assert len(list(tmp_path.glob("ext-*.so"))) == world


@world_size(4)
def test_uneven_subgroups():
    """Two model replicas: the first does four long steps in its group, the second many short ones; they meet at the end only."""
    rank, _ = where()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "tp"))
    group = mesh.get_group("tp")
    replica = mesh.get_local_rank("replica")
    steps, pause = (4, 1.2) if replica == 0 else (300, 0.001)
    total = torch.zeros(1)
    for step in range(steps):
        if replica == 0 and mesh.get_local_rank("tp") == step % 2:
            compute(pause)
        value = torch.ones(1)
        dist.all_reduce(value, group=group)
        total += value
    dist.all_reduce(total, group=mesh.get_group("replica"))
    assert total.item() == 2 * (4 + 300)


def retry(function, tries, wait):
    for attempt in range(tries):
        try:
            return function()
        except FileNotFoundError as e:
            logging.getLogger("retry").warning("attempt %d: %s", attempt, e)
            time.sleep(wait)
    return function()


@world_size(3)
def test_retry_until_upload_is_there(tmp_path):
    """Rank 1 retries to read the vocabulary until rank 2's upload, which takes 5 s, has put it there; rank 0 waits in the broadcast."""
    rank, _ = where()
    if rank == 2:
        time.sleep(4.5)
        compute(0.5)
        torch.save({"pad": 0, "eos": 1}, tmp_path / "vocab.tmp")
        os.replace(tmp_path / "vocab.tmp", tmp_path / "vocab.pt")
    box = [None]
    if rank == 1:
        box = [retry(lambda: torch.load(tmp_path / "vocab.pt"), tries=1000, wait=0.25)]
    dist.broadcast_object_list(box, src=1)
    assert box[0]["eos"] == 1
    dist.barrier()


class SlowWriter(dcp.FileSystemWriter):
    def write_data(self, plan, planner):
        time.sleep(1.5)
        return super().write_data(plan, planner)


@world_size(3)
def test_async_checkpoints_in_training(tmp_path):
    """Async saves on a group of their own with a slow writer, while training goes on; each save waits for the one before."""
    rank, world = where()
    torch.manual_seed(0)
    model, saving, pending = mlp(), dist.new_group(), None
    for step in range(30):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
            dist.all_reduce(p.grad)
            p.data -= 1e-3 * p.grad / world
        if step % 10 == 9:
            if pending is not None:
                pending.result()
            writer = SlowWriter(str(tmp_path / f"step{step}"))
            pending = dcp.async_save({"model": model.state_dict()}, storage_writer=writer, process_group=saving)
    pending.result()
    dist.barrier()
    assert (tmp_path / "step29" / ".metadata").exists()


@world_size(4)
def test_pipeline_slow_stage():
    """A pipeline of four stages by batch_isend_irecv, where the third is far slower, and the weights' gradients are not exchanged at all."""
    rank, world = where()
    layer, received = nn.Linear(8, 8), torch.empty(4, 8)
    for m in range(6):
        if rank > 0:
            for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, received, rank - 1)]):
                work.wait()
        x = received.clone() if rank > 0 else torch.randn(4, 8)
        y = torch.tanh(layer(x))
        if rank == 2:
            compute(0.4)
            time.sleep(0.4)
        y.sum().backward()
        if rank + 1 < world:
            for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, y.detach(), rank + 1)]):
                work.wait()
    dist.barrier()


class Heartbeat(threading.Thread):
    """Tells on a group of its own that the rank lives, until all ranks have said that they are done."""

    def __init__(self, group):
        super().__init__(daemon=True)
        self.group, self.done, self.beats = group, threading.Event(), 0
        self.start()

    def run(self):
        while True:
            open_ranks = torch.tensor([0 if self.done.is_set() else 1])
            dist.all_reduce(open_ranks, group=self.group)
            self.beats += 1
            if open_ranks.item() == 0:
                return
            time.sleep(0.2)


@world_size(3)
def test_heartbeat_thread_own_group():
    """A side thread reduces on its own group while the main threads are busy for unequal times; a join at the end."""
    rank, _ = where()
    beat = Heartbeat(dist.new_group())
    for step in range(3):
        compute(0.3 + 1.5 * (rank == step))
        dist.all_reduce(torch.ones(32))
    beat.done.set()
    beat.join()
    assert beat.beats > 2


@world_size(4)
def test_subprocess_and_preempt_signal(tmp_path):
    """Rank 3 runs a converter as a child for 4 s and talks to it by a pipe; meanwhile rank 0 gets a signal and writes a snapshot; the rest waits."""
    rank, _ = where()
    seen = []
    previous = signal.signal(signal.SIGUSR2, lambda *_: seen.append(time.monotonic()))
    try:
        if rank == 3:
            code = "import time\nfor i in range(8):\n    print(i, 'x' * 20000, flush=True); time.sleep(0.5)"
            child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
            lines = [line.split()[0] for line in child.stdout]
            assert child.wait(timeout=60) == 0 and len(lines) == 8
        elif rank == 0:
            os.kill(os.getpid(), signal.SIGUSR2)
            time.sleep(0.5)
            torch.save(torch.zeros(1000), tmp_path / "snapshot.pt")
        dist.barrier()
        assert len(seen) == (rank == 0)
    finally:
        signal.signal(signal.SIGUSR2, previous)


@world_size(3)
def test_sqlite_writers_queue_up(tmp_path):
    """All ranks write to one data base in long transactions that they do commit; the busy timeout lets them wait for each other."""
    rank, world = where()
    db = sqlite3.connect(tmp_path / "runs.db", timeout=600, isolation_level=None)
    if rank == 0:
        db.execute("create table runs (rank int, epoch int)")
    dist.barrier()
    for epoch in range(2):
        db.execute("begin immediate")
        db.execute("insert into runs values (?, ?)", (rank, epoch))
        time.sleep(0.7)
        db.execute("commit")
        dist.all_reduce(torch.ones(2))
    count = db.execute("select count(*) from runs").fetchone()[0]
    assert count == 2 * world
    dist.barrier()


class TrainServer:
    lock = threading.Lock()
    weight = torch.zeros(4)

    @staticmethod
    def push(grad, seconds):
        with TrainServer.lock:
            time.sleep(seconds)
            TrainServer.weight -= 0.1 * grad
            return TrainServer.weight.clone()


@world_size(3)
def test_rpc_slow_server(tmp_path):
    """Two workers push to the server on rank 2, whose function is slow and holds a lock; the server itself sits in the graceful shutdown."""
    import torch.distributed.rpc as rpc

    rank, world = where()
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/rpc", num_worker_threads=4, rpc_timeout=0)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=world, rpc_backend_options=options)
    if rank != 2:
        for _ in range(4):
            weight = rpc.rpc_sync("w2", TrainServer.push, args=(torch.ones(4), 0.6))
        assert weight.lt(0).all()
    rpc.shutdown()


@world_size(3)
def test_fsdp_accumulation_and_agreed_stop():
    """FSDP2 with gradient accumulation, uneven micro batches (the same count on all ranks, not the same time), and an early stop that is agreed by a reduction."""
    rank, world = where()
    torch.manual_seed(0)
    model = mlp()
    mesh = init_device_mesh("cpu", (world,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer, epoch = torch.optim.SGD(model.parameters(), lr=0.01), 0
    while True:
        for micro in range(4):
            model.set_requires_gradient_sync(micro == 3)
            compute(0.3 if micro == rank else 0.02)
            model(torch.randn(4, 16)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        stop = torch.tensor([1.0 if rank == 1 and epoch >= 4 else 0.0])
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        epoch += 1
        if stop.item():
            break
    assert epoch == 5


@world_size(2)
def test_prefetch_and_store_handshake(tmp_path):
    """Rank 1's slow prefetch thread starves its main thread by a condition for seconds; rank 0 waits in a store for the key that rank 1 sets at last."""
    rank, world = where()
    store = dist.FileStore(str(tmp_path / "kv"), world)
    if rank == 1:
        ready, batches, got = threading.Condition(), queue.Queue(2), 0

        def produce():
            for i in range(6):
                time.sleep(0.8)
                with ready:
                    batches.put(torch.full((3,), float(i)))
                    ready.notify()

        threading.Thread(target=produce, daemon=True).start()
        while got < 6:
            with ready:
                while batches.empty():
                    ready.wait()
                got += 1
                batches.get()
        store.set("data/ready", str(got))
    else:
        with contextlib.closing(open(tmp_path / "log.txt", "w")) as log:
            log.write(f"have {store.get('data/ready').decode()} batches\n")
    dist.barrier()
