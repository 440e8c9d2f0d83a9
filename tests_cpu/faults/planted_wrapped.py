"""DDP, recomputation, FSDP2, DTensor and distributed checkpoints: programs as users write them, each with a fault after a real bug report.

Written by hands that had not read the rules. A verdict must name a line that is marked with HERE.
"""

from __future__ import annotations

import contextlib
import os
import threading

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from tests_cpu.faults.planting import planted


def where():
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def mlp(width=16, depth=2):
    return nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())])


# DDP


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.text, self.image, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, text, image):
        h = self.text(text)
        if image is not None:  # HERE
            h = h + self.image(image)
        return self.head(h.relu())


@planted("data_dependent_branch", [2], n=3, marked=True)
def test_ddp_text_only_batch():
    """Rank 2 gets a batch without images, its image tower takes no part, and the bucket that the others reduce is never ready there."""
    rank, world = where()
    torch.manual_seed(0)
    model = DDP(TwoTowers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(6):
        image = None if rank == 2 and step == 4 else torch.randn(4, 16)
        loss = model(torch.randn(4, 16), image).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()  # HERE
        optimizer.step()
        seen = [torch.zeros(()) for _ in range(world)]
        dist.all_gather(seen, loss.detach())  # HERE


@planted("skipped_collective", [0], n=3, marked=True)
def test_accum_tail_never_syncs():
    """Rank 0 has one micro batch less and the tail is not flushed, so its last backward stays under no_sync and never reduces."""
    rank, _ = where()
    torch.manual_seed(0)
    model = DDP(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches, accumulate = [torch.randn(4, 16) for _ in range(7 if rank == 0 else 8)], 4
    for epoch in range(2):
        for i, batch in enumerate(batches):
            step_now = (i + 1) % accumulate == 0
            with contextlib.nullcontext() if step_now else model.no_sync():  # HERE
                loss = model(batch).pow(2).mean() / accumulate
                loss.backward()  # HERE
            if step_now:
                optimizer.step()
                optimizer.zero_grad()
        dist.barrier()  # HERE


class TiedTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.block = nn.Linear(8, 16), mlp()

    def forward(self, x):
        x = self.embed(x)
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=True)  # HERE
        return x


@planted("ready_twice", [0, 1], marked=True)
def test_tied_reentrant_checkpoint():
    """The same block is checkpointed twice with use_reentrant=True under DDP, so its parameters are ready twice in one backward, on every rank."""
    model = DDP(TiedTwice())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        loss = model(torch.randn(4, 8)).pow(2).mean()
        loss.backward()  # HERE
        optimizer.step()
        optimizer.zero_grad()


# recomputation


class SyncedNorm(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        with torch.no_grad():
            moment = x.pow(2).mean(0)
            dist.all_reduce(moment)  # HERE
        return (x / (moment + 1e-3).sqrt() * self.scale).tanh()


class SyncedNet(nn.Module):
    def __init__(self, recompute):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), SyncedNorm()) for _ in range(2))
        self.recompute = recompute

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)  # HERE
        return x


@planted("skipped_collective", [1], n=3, marked=True)
def test_recompute_turned_off():
    """Rank 1 has memory to spare and turns checkpointing off, so it does not repeat the norm's all_reduce that the others recompute in backward."""
    rank, world = where()
    free_gib = {0: 3.0, 1: 11.5, 2: 3.2}[rank]
    torch.manual_seed(0)
    model = SyncedNet(recompute=True)
    for step in range(5):
        if step == 3 and free_gib > 8:
            model.recompute = False
        loss = model(torch.randn(8, 16)).pow(2).mean()
        loss.backward()  # HERE
        losses = [torch.zeros(()) for _ in range(world)]
        dist.all_gather(losses, loss.detach())  # HERE


# FSDP2, DTensor


class Sampler:
    def __init__(self, model, every):
        self.model, self.every = model, every

    def on_step_end(self, rank, step):
        if rank == 0 and step % self.every == self.every - 1:
            with torch.no_grad():
                self.model(torch.randn(1, 16))  # HERE


@planted("extra_collective", [0], n=3, marked=True)
def test_fsdp_sample_on_main():
    """Rank 0 alone samples from the sharded model, whose forward gathers the parameters; the others are in the reduction of the loss."""
    rank, _ = where()
    torch.manual_seed(0)
    model = mlp()
    mesh = init_device_mesh("cpu", (3,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer, sampler = torch.optim.SGD(model.parameters(), lr=0.01), Sampler(model, every=4)
    for step in range(8):
        loss = model(torch.randn(4, 16)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sampler.on_step_end(rank, step)  # HERE
        total = loss.detach().clone()
        dist.all_reduce(total)  # HERE


class WeightWatch:
    """Logs the norm of a sharded weight, on the last rank, where the progress bar is."""

    def __init__(self, rank, world):
        self.active = rank == world - 1

    def log(self, step, weight):
        if self.active and step == 3:
            norm = weight.full_tensor().norm()  # HERE
            print(f"step {step}: |w| = {norm:.3f}")


@planted("extra_collective", [3], n=4, marked=True)
def test_dtensor_norm_of_last_rank():
    """Only rank 3 calls full_tensor for its log line; the others go on to the reduction of the next matrix product."""
    rank, world = where()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    weight = distribute_tensor(torch.randn(16, 16), mesh, [Shard(0)])
    watch = WeightWatch(rank, world)
    for step in range(6):
        x = DTensor.from_local(torch.randn(4, 4), mesh, [Shard(1)])
        y = (x @ weight).redistribute(mesh, [Replicate()]).to_local()  # HERE
        weight = weight * (1 - 1e-3 * float(y.sum().sign()))
        watch.log(step, weight)  # HERE


# distributed checkpoints


class Checkpointer:
    def __init__(self, folder, rank):
        self.folder, self.rank = folder, rank

    def maybe_save(self, model, step):
        if step == 3 and self.rank == 0:
            dcp.save({"model": model.state_dict()}, checkpoint_id=str(self.folder / f"step{step}"))  # HERE


@planted("extra_collective", [0], n=3, marked=True)
def test_dcp_save_by_main(tmp_path):
    """A torch.save habit: dcp.save, which is collective, is called by rank 0 only; the others are in the next step's barrier."""
    rank, _ = where()
    model = DDP(mlp())
    saver = Checkpointer(tmp_path, rank)
    for step in range(6):
        model(torch.randn(4, 16)).sum().backward()
        saver.maybe_save(model.module, step)  # HERE
        dist.barrier()  # HERE


class LockedWriter(dcp.FileSystemWriter):
    lock = threading.Lock()

    def write_data(self, plan, planner):
        with self.lock:  # HERE
            return super().write_data(plan, planner)


@planted("lock_deadlock", [2], n=3, marked=True)
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
