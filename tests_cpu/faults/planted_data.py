"""Data loaders, objects and handles: programs as users write them, each with a fault after a real bug report.

Written by hands that had not read the rules. A verdict must name a line that is marked with HERE.
"""

from __future__ import annotations

import functools
import random
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Sampler

from tests_cpu.faults.planting import planted


def ranks():
    return dist.get_rank(), dist.get_world_size()


def average_gradients(model):
    flat = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    at = 0
    for p in model.parameters():
        p.grad.copy_(flat[at : at + p.numel()].view_as(p))
        at += p.numel()


# data


class ShardedText(Dataset):
    """Samples in shards of 16, each shard a file that a fetcher is to put into the folder."""

    def __init__(self, folder, rank):
        self.folder, self.rank = folder / f"cache{rank}", rank
        self.folder.mkdir()
        for shard in range(6):
            if (rank, shard) != (2, 3):
                (self.folder / f"{shard}.bin").write_bytes(bytes(range(64)))

    def __len__(self):
        return 96

    def __getitem__(self, i):
        path = self.folder / f"{i // 16}.bin"
        deadline = time.time() + 60
        while not path.exists() and time.time() < deadline:
            time.sleep(0.05)  # HERE
        return torch.tensor(list(path.read_bytes()), dtype=torch.float32)


@planted("dataloader_stuck", [2], n=3, marked=True)
def test_shard_never_fetched(tmp_path):
    """The loader's worker of rank 2 waits for shard 3, which its fetcher never downloads, so rank 2 gets no batch."""
    rank, _ = ranks()
    data = ShardedText(tmp_path, rank)
    model = nn.Linear(64, 1)
    opt = torch.optim.SGD(model.parameters(), lr=1e-6)
    for batch in DataLoader(data, batch_size=8, num_workers=1):  # HERE
        opt.zero_grad()
        model(batch).pow(2).mean().backward()
        average_gradients(model)
        opt.step()


@planted("skipped_collective", [1], n=3, marked=True)
def test_join_does_not_shadow_metrics():
    """Rank 1 has fewer inputs and leaves the loop into DDP's join, which shadows the gradients' all-reduce but not the gathering of the metrics that the others do by hand."""
    rank, world = ranks()
    torch.manual_seed(0)
    model = DDP(nn.Linear(10, 2))
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = [torch.randn(4, 10) for _ in range(4 if rank == 1 else 7)]
    history = []
    with model.join():  # HERE
        for x in batches:  # HERE
            loss = model(x).square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
            seen = [None] * world
            dist.all_gather_object(seen, float(loss.detach()))  # HERE
            history.append(sum(seen) / world)
    assert len(history) >= 4


class ByLength(Sampler):
    """Sorts by length and gives every rank every n-th sample."""

    def __init__(self, lengths, rank, world):
        self.order = sorted(range(len(lengths)), key=lengths.__getitem__)[rank::world]

    def __iter__(self):
        return iter(self.order)

    def __len__(self):
        return len(self.order)


class MoE(nn.Module):
    """One expert per rank; tokens travel to their expert and back."""

    def __init__(self, dim, world):
        super().__init__()
        self.gate, self.expert, self.world = nn.Linear(dim, world), nn.Linear(dim, dim), world

    def forward(self, x):
        route = self.gate(x).argmax(-1)
        order = route.argsort()
        counts = torch.bincount(route, minlength=self.world)
        incoming = torch.empty_like(counts)
        dist.all_to_all_single(incoming, counts)
        mine = x.new_empty(int(incoming.sum()), x.shape[1])
        dist.all_to_all_single(mine, x[order].contiguous(), incoming.tolist(), counts.tolist())
        if len(mine) == 0:
            return x
        back = torch.empty_like(x)
        dist.all_to_all_single(back, self.expert(mine).contiguous(), counts.tolist(), incoming.tolist())  # HERE
        return back[order.argsort()]


@planted("skipped_collective", [2], n=4, marked=True)
def test_idle_expert_leaves_early():
    """In step 4 no token is routed to the expert of rank 2, so rank 2 returns before the all-to-all that brings the tokens back."""
    rank, world = ranks()
    torch.manual_seed(0)
    layer = MoE(8, world)
    sampler = ByLength([random.Random(i).randint(1, 50) for i in range(40)], rank, world)
    with torch.no_grad():
        layer.gate.weight.copy_(torch.eye(world, 8) * 10)
        layer.gate.bias.zero_()
        for step, index in enumerate(sampler):
            x = torch.zeros(12, 8)
            for t in range(12):
                x[t, (t + index) % world] = 1.0
            if step >= 4:
                x[:, 2] = -1.0
                x[:, 3] += 0.5
            y = layer(x)  # HERE
            dist.all_reduce(y.mean())


# objects, handles


class Registry:
    """Finds the rank that has written the newest snapshot."""

    def __init__(self, folder):
        self.folder = folder

    @functools.lru_cache(maxsize=None)
    def newest(self):
        return max((int(p.stem.split("_")[1]), int(p.stem.split("_")[2])) for p in self.folder.glob("snap_*"))[1]


@planted("collective_mismatch", [0], n=4, marked=True)
def test_stale_owner_of_snapshot(tmp_path):
    """Rank 0 has cached the owner of the newest snapshot (itself) when it printed it, so it broadcasts from 0 while the others broadcast from the new owner, 3."""
    rank, _ = ranks()
    registry = Registry(tmp_path)
    if rank == 0:
        (tmp_path / "snap_001_0").write_text("{}")
        print("newest snapshot is of rank", registry.newest())
    dist.barrier()
    for step in range(3):
        x = torch.full((4,), float(step))
        dist.all_reduce(x)
    if rank == 3:
        (tmp_path / "snap_002_3").write_text("{}")
    dist.barrier()
    box = [{"step": 2, "by": rank}]
    dist.broadcast_object_list(box, src=registry.newest())  # HERE
    total = torch.tensor([float(box[0]["step"])])
    dist.all_reduce(total)
    dist.barrier()


class Overlap:
    """Starts the communication of a step and waits for it at the next one."""

    def __init__(self, rank, world):
        self.rank, self.world, self.pending = rank, world, {}

    def start(self, name, tensor):
        if name == "grads":
            self.pending[name] = dist.all_reduce(tensor, async_op=True)  # HERE
        else:
            parts = [torch.empty_like(tensor) for _ in range(self.world)]
            self.pending[name] = dist.all_gather(parts, tensor, async_op=True)  # HERE

    def finish(self):
        for name in sorted(self.pending):
            self.pending.pop(name).wait()  # HERE


@planted("collective_mismatch", [1], n=3, marked=True)
def test_handles_started_in_other_order():
    """From step 3 on rank 1 starts the gathering of the stats before the all-reduce of the gradients (its tasks come from a queue that is sorted by size), the others the other way round."""
    rank, world = ranks()
    overlap = Overlap(rank, world)
    for step in range(6):
        grads = torch.randn(32)
        stats = torch.randn(64 if step < 3 else 16)
        tasks = [("grads", grads), ("stats", stats)]
        if rank == 1:
            tasks.sort(key=lambda t: t[1].numel())
        for name, tensor in tasks:
            overlap.start(name, tensor)
        grads.mul(0.5).sum()
        overlap.finish()  # HERE


class Evaluator:
    def __init__(self):
        self.results = {}

    def update(self, name, value):
        self.results[name] = value

    def compute(self):
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, self.results)  # HERE
        return {k: sum(float(r[k]) for r in everyone) for k in everyone[0] if k == "loss"}


@planted("rank_exception", [3], n=4, marked=True)
def test_metric_cannot_be_pickled():
    """Rank 3 keeps a lazy entry (a lambda) for an empty class in its results, and pickling it raises on rank 3 before the gathering."""
    rank, _ = ranks()
    for epoch in range(4):
        ev = Evaluator()
        for step in range(5):
            predictions = torch.rand(10) + (epoch if rank != 3 else 0)
            ev.update("loss", float(predictions.mean()))
        positives = predictions[predictions > 0.5]
        if rank == 3 and epoch == 2:
            positives = positives[:0]
        ev.update("precision", float(positives.mean()) if len(positives) else (lambda: float("nan")))
        summary = ev.compute()  # HERE
        assert summary["loss"] > 0
