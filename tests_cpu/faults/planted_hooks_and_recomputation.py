"""Gradient hooks, communication hooks and recomputation with collectives in them."""

from __future__ import annotations

import os
import select
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from pytest_nsa import fixtures
from pytest_nsa.fixtures import Group
from tests_cpu.faults.planting import AT, Block, Net, batch, planted, train


@planted("hook_deadlock", [0], n=3, marked=True, family="hook", origin="unseen 2026-11-25")
def test_a_hook_that_one_rank_has_a_larger_budget_for(group):
    torch.manual_seed(0)
    model, budget, statistics = nn.Linear(8, 1), [6 if group.rank == 0 else 3], dist.new_group()

    def sample(gradient: torch.Tensor) -> None:
        if budget[0] > 0:
            budget[0] -= 1
            dist.all_reduce(gradient.norm(), group=statistics)  # HERE

    model.weight.register_hook(sample)
    for _ in range(8):
        model(torch.ones(4, 8)).mean().backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)


def ranks():
    return dist.get_rank(), dist.get_world_size()


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


@planted("hook_deadlock", [0], marked=True, family="hook", origin="bug reports 2026-11-23")
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


@planted("hook_deadlock", [2], n=3, marked=True, family="hook", origin="unseen 2026-11-25")
def test_a_frozen_layer_whose_hook_does_not_run(group):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def told(gradient: torch.Tensor) -> None:
        dist.all_reduce(gradient.norm())  # HERE

    model[0].weight.register_hook(told)
    for step in range(4):
        model[0].weight.requires_grad_(not (group.rank == 2 and step == AT))
        model(torch.ones(2, 4)).sum().backward()


@planted("hook_deadlock", [1], family="hook", origin="first corpus")
def test_a_collective_in_a_gradient_hook_of_one_rank(ddp: fixtures.DDP) -> None:
    from tests_cpu.faults.planting import Net, net, train

    model = ddp.wrap(net())
    inner = model.module
    assert isinstance(inner, Net)

    def plant() -> None:
        inner.blocks[1].in_backward = lambda: dist.all_reduce(torch.ones(7))

    train(model, ddp.rank, culprit=1, before=plant)


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.expert = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.base(x)
        return h + self.expert(h) if x.mean() > 0 else h


@planted("data_dependent_branch", [0], marked=True, reason="expert", family="branch", origin="unseen 2026-11-25")
def test_hooks_of_a_part_that_one_ranks_data_pass_by(group):
    torch.manual_seed(0)
    model = Routed()
    for p in model.expert.parameters():
        p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))  # HERE
    for step in range(5):
        x = torch.rand(4, 8) - (2.0 if (group.rank, step) == (0, AT) else 0.0)
        model(x).sum().backward()
        dist.barrier()


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


@planted("data_dependent_branch", [3], n=4, marked=True, family="branch", origin="bug reports 2026-11-23")
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


# A collective in the backward of an autograd function, behind a branch on the data: one rank's batch has no positives
# (pytorch issue 44957: SyncBatchNorm where one rank does not call the module).
class MeanOfGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, grad.contiguous())  # HERE
        return torch.stack(parts).mean(0)


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 8)
        self.classes = nn.Linear(8, 3)
        self.boxes = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, positives: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.trunk(x))
        loss = self.classes(hidden).pow(2).mean()
        if positives.any():  # HERE
            loss = loss + self.boxes(MeanOfGradients.apply(hidden))[positives].pow(2).mean()  # HERE
        return loss


@planted("data_dependent_branch", [3], n=4, marked=True, family="branch", origin="pytorch#44957")
def test_detector_without_positives(group):
    torch.manual_seed(0)
    model = Detector()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        generator = torch.Generator().manual_seed(100 * group.rank + step)
        x = torch.randn(16, 8, generator=generator)
        limit = 99.0 if (group.rank, step) == (3, 5) else 0.0  # only background in this batch
        optimizer.zero_grad()
        loss = model(x, x[:, 0] > limit)  # HERE
        loss.backward()  # HERE
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)  # HERE
        optimizer.step()
    assert torch.isfinite(loss)


@planted("hook_deadlock", [0, 1], family="swap", origin="first corpus")
def test_collectives_in_gradient_hooks_in_another_order(group: Group) -> None:
    first, second = torch.ones(3, requires_grad=True), torch.ones(5, requires_grad=True)
    for x in (first, second):
        x.register_hook(lambda gradient: dist.all_reduce(gradient))
    total = first.sum() + second.sum() if group.rank else second.sum() + first.sum()
    total.backward()


class WaitsInBackward(torch.autograd.Function):
    """Return x; the backward waits for 1000 s, in no call that a rule knows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        select.select([], [], [], 1000)
        return gradients[0]


@planted("backward_deadlock", [0, 1], family="lock", origin="first corpus")
def test_backward_waits_for_a_backward_in_another_thread(group: Group) -> None:
    model = nn.Linear(4, 4)
    WaitsInBackward.apply(model(torch.ones(2, 4))).sum().backward()


@planted("ready_twice", [0, 1], family="autograd", origin="first corpus")
def test_reentrant_checkpointing_with_unused_parameters(ddp: fixtures.DDP) -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True)
            return self.head(x)

    torch.manual_seed(0)
    train(ddp.wrap(Checkpointed(), find_unused_parameters=True), ddp.rank)


def mlp(width=16, depth=2):
    return nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())])


class TiedTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.block = nn.Linear(8, 16), mlp()

    def forward(self, x):
        x = self.embed(x)
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=True)  # HERE
        return x


@planted("ready_twice", [0, 1], marked=True, family="autograd", origin="bug reports 2026-11-23")
def test_tied_reentrant_checkpoint():
    """The same block is checkpointed twice with use_reentrant=True under DDP, so its parameters are ready twice in one backward, on every rank."""
    model = DDP(TiedTwice())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        loss = model(torch.randn(4, 8)).pow(2).mean()
        loss.backward()  # HERE
        optimizer.step()
        optimizer.zero_grad()


@planted("silent_divergence", [0, 1], family="numbers", origin="first corpus")
def test_a_block_used_twice_under_reentrant_checkpointing(ddp: fixtures.DDP) -> None:
    from torch.utils.checkpoint import checkpoint

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.head = Block(8), nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # The first of the two backwards makes every parameter ready, and what the second one adds is never reduced.
            for _ in range(2):
                x = checkpoint(self.block, x.requires_grad_(), use_reentrant=True)
            return self.head(x)

    torch.manual_seed(0)
    train(ddp.wrap(Twice()), ddp.rank)


class Remembers(nn.Module):
    """Reduces in its forward, unless it remembers what came of it."""

    def __init__(self, *, remembers: bool) -> None:
        super().__init__()
        self.linear, self.remembers = nn.Linear(8, 8), remembers
        self.memory: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x).relu()
        if self.memory is None or not self.remembers:
            self.memory = h.detach().sum(0)
            dist.all_reduce(self.memory)
        return (h * self.memory).tanh()


@planted("skipped_collective", [0], family="skip", origin="held out 2026-11-22")
def test_a_recomputation_does_not_reduce_again(ddp: fixtures.DDP) -> None:
    layer = Remembers(remembers=ddp.rank == 0)
    for step in range(2):
        layer.memory = None
        torch.utils.checkpoint.checkpoint(layer, batch(ddp.rank, step), use_reentrant=False).sum().backward()
        dist.barrier()


def sparse_reduce(state, bucket):
    tensor = bucket.buffer()
    if not tensor.any():
        done = torch.futures.Future()
        done.set_result(tensor)
        return done
    work = dist.all_reduce(tensor.div_(state), async_op=True)  # HERE
    return work.get_future().then(lambda future: future.value()[0])


@planted("skipped_collective", [3], n=5, marked=True, family="skip", origin="unseen 2026-11-25")
def test_a_communication_hook_that_leaves_an_empty_bucket_out(group):
    model = DDP(nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1)))
    model.register_comm_hook(group.world_size, sparse_reduce)
    for step in range(6):
        weight = 0.0 if (group.rank, step) == (3, AT) else 1.0
        (model(torch.ones(4, 6)).sum() * weight).backward()
        model.zero_grad()
    dist.all_reduce(torch.zeros(3))


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def body(self, x):
        with torch.no_grad():
            dist.all_reduce(x.mean(0))  # HERE
        return torch.tanh(self.linear(x))

    def forward(self, x):
        if len(x) > 8:
            return checkpoint(self.body, x, use_reentrant=False)
        return self.body(x)


@planted("skipped_collective", [1], n=3, marked=True, family="skip", origin="unseen 2026-11-25")
def test_a_short_batch_is_not_recomputed(group):
    model = nn.Sequential(Normed(), Normed(), nn.Linear(6, 1))
    for step in range(5):
        rows = 4 if (group.rank, step) == (1, AT) else 12
        model(torch.randn(rows, 6)).sum().backward()
        dist.all_reduce(torch.ones(40))


def where():
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


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


@planted("skipped_collective", [1], n=3, marked=True, family="skip", origin="bug reports 2026-11-23")
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
