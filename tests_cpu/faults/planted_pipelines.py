"""Pipelines, halo exchanges, device meshes and groups: programs as users write them, each with a fault after a real bug report.

Written by hands that had not read the rules. A verdict must name a line that is marked with HERE.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

from tests_cpu.faults.planting import planted


def where():
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def mlp(width=16, depth=2):
    return nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())])


# pipelines, send and receive


class PipelineStage:
    def __init__(self, rank, world, drop_empty=False):
        self.rank, self.world, self.drop_empty = rank, world, drop_empty
        self.layer = nn.Linear(8, 8, bias=False)

    def micro(self, x):
        if self.rank > 0:
            x = torch.empty(4, 8)
            dist.recv(x, self.rank - 1)  # HERE
        y = torch.relu(self.layer(x)).detach()
        if self.drop_empty and not y.any():
            return  # HERE
        if self.rank + 1 < self.world:
            dist.send(y, self.rank + 1)  # HERE


@planted("p2p_unmatched", [2], n=4, marked=True)
def test_pp_drops_empty_micro():
    """Stage 2 drops a micro batch that is all padding and sends nothing on for it, so stage 3 waits for one more receive."""
    rank, world = where()
    stage = PipelineStage(rank, world, drop_empty=rank == 2)
    for step in range(3):
        for m in range(4):
            padded = step == 2 and m == 1
            stage.micro(torch.zeros(4, 8) if padded else torch.rand(4, 8) + 0.1)  # HERE
        dist.barrier()


class HaloGrid:
    """A ring of slabs; after a rebalance the neighbour table is computed anew."""

    def __init__(self, rank, world):
        self.rank, self.world = rank, world
        self.slab = torch.randn(6, 32)
        self.left, self.right = (rank - 1) % world, (rank + 1) % world

    def rebalance(self, holes):
        if self.rank in holes:
            self.left = (self.left - 1) % self.world  # HERE

    def exchange(self):
        ghost_l, ghost_r = torch.empty(32), torch.empty(32)
        ops = [
            dist.P2POp(dist.isend, self.slab[-1].contiguous(), self.right),
            dist.P2POp(dist.irecv, ghost_l, self.left),
            dist.P2POp(dist.isend, self.slab[0].contiguous(), self.left),
            dist.P2POp(dist.irecv, ghost_r, self.right),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()  # HERE
        self.slab[0] = (self.slab[0] + ghost_l) / 2
        self.slab[-1] = (self.slab[-1] + ghost_r) / 2


@planted("p2p_unmatched", [4], n=6, marked=True)
def test_halo_stale_neighbour():
    """After the rebalance rank 4 exchanges its halo with rank 2 in place of rank 3, which knows nothing of that."""
    rank, world = where()
    grid = HaloGrid(rank, world)
    for step in range(6):
        if step == 4:
            grid.rebalance(holes={4})  # HERE
        grid.exchange()  # HERE
    dist.barrier()


# meshes and sub-groups


@planted("skipped_collective", [1], n=4, marked=True)
def test_mesh_spike_filter():
    """Rank 1 skips a step by its own overflow check, before the tensor-parallel reduction that its row waits in."""
    rank, _ = where()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp, dp = mesh.get_group("tp"), mesh.get_group("dp")
    torch.manual_seed(rank)
    weight = torch.randn(8, 8)
    for step in range(6):
        x = torch.randn(4, 8)
        if rank == 1 and step == 3:
            x[0] = float("inf")
        partial = x @ weight
        if not torch.isfinite(partial).all():
            continue  # HERE
        dist.all_reduce(partial, group=tp)  # HERE
        grad = x.t() @ partial
        dist.all_reduce(grad, group=dp)  # HERE
        weight = weight - 1e-4 * grad / grad.norm()
    dist.barrier()  # HERE


class ExpertRouter:
    """The ranks that host an expert have a group of their own, made by its members alone (local synchronization)."""

    def __init__(self, rank, table):
        self.rank, self.table, self.group = rank, table, None

    def build(self):
        hosts = self.table["hosts"]
        if self.table["mine"] is not None:  # HERE
            self.group = dist.new_group(hosts, use_local_synchronization=True)  # HERE
        return self

    def balance(self, load):
        if self.group is not None:
            dist.all_reduce(load, group=self.group)
        dist.all_reduce(load)  # HERE
        return load


@planted("init_timeout", [1], n=4, marked=True)
def test_new_group_stale_table():
    """Rank 1's placement table says that it hosts no expert, so it does not make the group that its fellow hosts 0 and 3 are making."""
    rank, _ = where()
    placement = {0: "e0", 1: "e1", 3: "e2"}
    for _ in range(3):
        dist.all_reduce(torch.ones(4))
    table = {"hosts": sorted(placement), "mine": placement.get(rank)}
    if rank == 1:
        table["mine"] = None  # from before the rebalance
    router = ExpertRouter(rank, table).build()  # HERE
    for _ in range(3):
        router.balance(torch.rand(4))


class BucketFlusher:
    """Reduces the pending gradients of both mesh dimensions, the larger first."""

    def __init__(self, mesh):
        self.mesh, self.pending = mesh, {}

    def push(self, dim, grad):
        self.pending.setdefault(dim, []).append(grad)

    def flush(self):
        order = sorted(self.pending, key=lambda d: (-len(self.pending[d]), d))
        for dim in order:
            flat = torch.stack([g.sum() for g in self.pending[dim]]).sum().view(1)
            dist.all_reduce(flat, group=self.mesh.get_group(dim))  # HERE
        self.pending.clear()


@planted("group_order_deadlock", [0, 3], n=4, marked=True, miss="two ranks of one kind")
def test_mesh_flush_order():
    """Ranks 1 and 2 have more pending in dp and reduce that first, ranks 0 and 3 begin with tp: a cycle of waits."""
    rank, _ = where()
    flusher = BucketFlusher(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    for step in range(5):
        flusher.push("dp", torch.randn(8))
        flusher.push("tp", torch.randn(8))
        if step == 3:
            flusher.push("dp" if rank in (1, 2) else "tp", torch.randn(8))
        flusher.flush()  # HERE
