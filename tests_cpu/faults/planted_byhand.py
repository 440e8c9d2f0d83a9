"""Gradient hooks, and parallelism by hand: programs as users write them, each with a fault after a real bug report.

Written by hands that had not read the rules. A verdict must name a line that is marked with HERE.
"""

from __future__ import annotations

import datetime
import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

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


# hooks


class WithAdapter(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.adapter, self.body, self.head = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, 1)

    def forward(self, x, languages):
        if "xx" in languages:
            x = x + self.adapter(x)
        return self.head(torch.relu(self.body(x)))


def reduce_in_backward(model):
    def hook(p):
        dist.all_reduce(p.grad)  # HERE
        p.grad /= dist.get_world_size()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)


@planted("data_dependent_branch", [3], n=4, marked=True)
def test_adapter_without_gradient():
    """In step 3 the batch of rank 3 has no sentence of the language of the adapter, so its adapter gets no gradient and its hooks do not run, while the hooks of the others all-reduce."""
    rank, _ = ranks()
    torch.manual_seed(1)
    model = WithAdapter(6)
    reduce_in_backward(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(6):
        languages = ["en", "xx", "de"]
        if (step, rank) == (3, 3):
            languages = ["en", "fr", "de"]
        loss = model(torch.randn(3, 6), languages).mean()
        loss.backward()  # HERE
        opt.step()
        opt.zero_grad()
        dist.barrier()


class NormLogger:
    """Makes a DDP communication hook that all-reduces, and looks at the norms of the gradients."""

    def __init__(self, rank, every):
        self.rank, self.every, self.calls, self.norms = rank, every, 0, []

    def log(self, norm):
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, norm)  # HERE
        self.norms.append(everyone)

    def hook(self, state, bucket):
        buffer = bucket.buffer().div_(dist.get_world_size())
        if bucket.is_last():
            self.calls += 1
            if self.rank == 0 and self.calls % self.every == 0:
                self.log(float(buffer.norm()))  # HERE
        return dist.all_reduce(buffer, async_op=True).get_future().then(lambda f: f.value()[0])


@planted("hook_deadlock", [0], marked=True)
def test_comm_hook_gathers_norms():
    """The DDP communication hook gathers the gradient norms every 4th step, but on rank 0 alone, because only that one logs."""
    rank, _ = ranks()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)))
    model.register_comm_hook(None, NormLogger(rank, every=4).hook)
    opt = torch.optim.Adam(model.parameters())
    for step in range(10):
        opt.zero_grad()
        model(torch.randn(8, 16)).abs().mean().backward()  # HERE
        opt.step()


class LayerDropStack(nn.Module):
    def __init__(self, depth, drop, seed):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(depth))
        self.drop, self.rng = drop, random.Random(seed)

    def forward(self, x):
        for layer in self.layers:
            if self.rng.random() < self.drop:  # HERE
                continue
            x = x + torch.tanh(layer(x))
        return x


@planted("unused_parameters", [1], n=3, marked=True)
def test_layer_drop_seeded_by_rank():
    """LayerDrop draws from a generator seeded with the rank; rank 1 drops a layer that the others keep, so DDP on rank 1 never sends that bucket."""
    rank, _ = ranks()
    torch.manual_seed(0)
    model = DDP(LayerDropStack(4, drop=0.03, seed=25 + rank))
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(12):
        x = torch.randn(5, 12)
        out = model(x)  # HERE
        out.square().mean().backward()  # HERE
        opt.step()
        opt.zero_grad()


# parallelism by hand


def ring_attention(q, k, v):
    """Sequence parallel causal attention: keys and values go round the ring."""
    rank, world = ranks()
    if rank == 0:
        # causal: the first block of the sequence sees only itself
        return torch.softmax(q @ k.T, -1) @ v
    scores, values, kv = [q @ k.T], [v], torch.stack([k, v])
    for hop in range(1, world):
        incoming = torch.empty_like(kv)
        out = dist.isend(kv, (rank + 1) % world)  # HERE
        dist.recv(incoming, (rank - 1) % world)  # HERE
        out.wait()  # HERE
        kv = incoming
        if (rank - hop) % world < rank:
            scores.append(q @ kv[0].T)
            values.append(kv[1])
    return torch.softmax(torch.cat(scores, -1), -1) @ torch.cat(values)


@planted("p2p_unmatched", [0], n=4, marked=True)
def test_ring_attention_first_block_leaves():
    """Rank 0 returns early since its causal block needs no other, so it neither passes its keys on to rank 1 nor takes those of rank 3."""
    rank, _ = ranks()
    torch.manual_seed(rank)
    block = torch.randn(8, 4)
    for warm in range(3):
        local = torch.softmax(block @ block.T, -1) @ block
        dist.all_reduce(local)
    out = ring_attention(block, block, block)  # HERE
    dist.all_reduce(out)


class SequenceParallelNorm:
    """Gathers the statistics of the sequence group and the loss scale of the world."""

    def __init__(self, group, members, rank):
        self.group, self.inside, self.rank = group, rank in members, rank
        self.members = members

    def sequence(self, x):
        if self.inside:
            parts = [torch.empty_like(x) for _ in self.members]
            dist.all_gather(parts, x, group=self.group)  # HERE
            x = torch.cat(parts).mean(0, keepdim=True).expand_as(x).contiguous()
        return x

    def scale(self, x):
        s = x.abs().max()
        dist.all_reduce(s, op=dist.ReduceOp.MAX)  # HERE
        return x / s

    def __call__(self, x, fused):
        return self.sequence(self.scale(x)) if fused else self.scale(self.sequence(x))


@planted("group_order_deadlock", [2], n=4, marked=True)
def test_fused_norm_swaps_groups():
    """On rank 2 the fused kernel is chosen in step 3 (its block is contiguous), which scales over the world before it gathers over the sequence group; ranks 0 and 1 gather first."""
    rank, _ = ranks()
    members = [0, 1, 2]
    group = dist.new_group(members)
    norm = SequenceParallelNorm(group, members, rank)
    for step in range(6):
        x = torch.rand(4, 6) + 0.1
        if rank != 2 or step < 3:
            x = x.t().contiguous().t()
        y = norm(x.contiguous(), fused=x.is_contiguous())  # HERE
        assert torch.isfinite(y).all()


class HostMetrics:
    """Averages the load of the hosts over a group of its own, with a short timeout so that it cannot disturb the training."""

    def __init__(self, settings):
        self.group = None
        if settings["host_metrics"]:
            self.group = dist.new_group(timeout=datetime.timedelta(minutes=20))  # HERE

    def step(self):
        if self.group is not None:
            load = torch.tensor([os.getloadavg()[0]])
            dist.all_reduce(load, group=self.group)


@planted("init_timeout", [4], n=5, marked=True)
def test_host_metrics_off_on_one_rank():
    """The settings of rank 4 come from an older file with host metrics off, so it does not call new_group, and the group of the others never forms."""
    rank, _ = ranks()
    settings = {"host_metrics": True, "lr": 0.1}
    if rank == 4:
        settings["host_metrics"] = False
    x = torch.ones(3)
    for _ in range(3):
        dist.all_reduce(x)
    metrics = HostMetrics(settings)  # HERE
    for _ in range(5):
        metrics.step()
        y = torch.rand(3)
        dist.all_reduce(y)
