"""DDP and the gradients that it expects: parameters without a gradient, branches of the forward, graphs that change."""

from __future__ import annotations

import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from pytest_nsa import fixtures
from pytest_nsa import trace as traced
from pytest_nsa.fixtures import Group, Trace
from tests_cpu.faults.planting import AT, Block, Net, batch, loss_of, net, planted, train


def ranks():
    return dist.get_rank(), dist.get_world_size()


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


@planted("unused_parameters", [1], n=3, marked=True, family="unused", origin="bug reports 2026-11-23")
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


class TwoHeads(nn.Module):
    """Two linear layers, of which the second is used where ``both`` is true."""

    def __init__(self, both: bool) -> None:
        super().__init__()
        self.used, self.other, self.both = nn.Linear(8, 1), nn.Linear(8, 1), both

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [B, 1] for x [B, 8]."""
        return self.used(x) + (self.other(x) if self.both else 0)


MISSING = "other.weight, other.bias"


@traced("grads")
@planted(
    "unused_parameters",
    [1],
    marked=True,
    reason=f"step 1 no gradient had arrived on rank 1 for {MISSING}; on the other",
    family="unused",
    origin="plan",
)
def test_missing_on_one_rank_and_ddp_waits(ddp: fixtures.DDP, trace: Trace) -> None:
    model = ddp.wrap(TwoHeads(both=ddp.rank == 0))
    with trace(model):  # HERE
        model(batch(ddp.rank, 0)).sum().backward()
    dist.all_reduce(torch.ones(2))


@traced("grads")
@planted(
    "unused_parameters", [0, 1], marked=True, reason=f"on ranks 0 and 1 for {MISSING}", family="unused", origin="plan"
)
def test_missing_everywhere_and_the_test_asserts_it(ddp: fixtures.DDP, trace: Trace) -> None:
    model = ddp.wrap(TwoHeads(both=False), find_unused_parameters=True)
    with trace(model):
        model(batch(ddp.rank, 0)).sum().backward()
    assert trace.missing_gradients() == []  # HERE


@traced("grads")
@planted(
    "unused_parameters",
    [1],
    n=3,
    marked=True,
    reason="on rank 1 for other.weight, other.bias; on the others all arrived",
    family="unused",
    origin="plan",
)
def test_missing_on_one_of_three_ranks_without_ddp(group: Group, trace: Trace) -> None:
    model = TwoHeads(both=group.rank != 1)
    with trace(model):
        model(batch(group.rank, 0)).sum().backward()
    assert trace.missing_gradients() == []  # HERE


@traced("grads")
@planted(
    "unused_parameters",
    [1],
    marked=True,
    reason=f"on rank 1 for {MISSING}; on the other rank all arrived",
    family="unused",
    origin="plan",
    miss="replicas that nothing wraps",
)
def test_missing_on_one_rank_of_replicas_that_reduce_by_hand(group: Group, trace: Trace) -> None:
    model = TwoHeads(both=group.rank == 0)
    with trace(model):  # HERE
        model(batch(group.rank, 0)).sum().backward()
    flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    dist.all_reduce(flat)  # of 18 numbers and of 9


@planted("unused_parameters", [1], family="unused", origin="first corpus")
def test_a_parameter_is_not_used_on_one_rank(ddp: fixtures.DDP) -> None:
    class Partly(Block):
        use = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if self.use else x

    torch.manual_seed(0)
    part = Partly(8)
    model = ddp.wrap(nn.Sequential(nn.Linear(8, 8), part, nn.Linear(8, 1)), find_unused_parameters=False)
    for step in range(6):
        part.use = not (ddp.rank == 1 and step >= AT)
        loss_of(model, batch(ddp.rank, step)).backward()


@planted("unused_parameters", [0, 1], family="unused", origin="first corpus")
def test_a_parameter_is_never_used(ddp: fixtures.DDP) -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(8, 1), nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    train(ddp.wrap(Head()), ddp.rank)


@traced("grads")
@planted("assertion", [0, 1], marked=True, reason="the loss", family="raise", origin="plan")
def test_unused_on_purpose_and_another_assertion(ddp: fixtures.DDP, trace: Trace) -> None:
    model = ddp.wrap(TwoHeads(both=False), find_unused_parameters=True)
    with trace(model):
        loss = model(batch(ddp.rank, 0)).sum()
        loss.backward()
    assert loss.abs().item() > 1e6, "the loss"  # HERE


def inner(model: nn.Module) -> Net:
    """What DDP wraps."""
    assert isinstance(model.module, Net)
    return model.module


@planted("static_graph_changed", [0, 1], family="autograd", origin="first corpus")
def test_a_static_graph_changes(ddp: fixtures.DDP) -> None:
    model = ddp.wrap(net(), static_graph=True)
    for step in range(6):
        if step == AT:
            inner(model).blocks = inner(model).blocks[:1]  # type: ignore[assignment]
        loss_of(model, batch(ddp.rank, step)).backward()


@planted("data_dependent_branch", [1], family="branch", origin="first corpus")
def test_ranks_take_different_paths(ddp: fixtures.DDP) -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.mean() > 5:
                x = self.right(x)
                shared = x.detach().mean()
                dist.all_reduce(shared)
                return x * shared
            return self.left(x)

    torch.manual_seed(0)
    model = ddp.wrap(nn.Sequential(nn.Linear(8, 8), Routed(), nn.Linear(8, 1)), find_unused_parameters=True)
    first = model.module[0]
    for step in range(6):
        if step == AT and ddp.rank == 1:
            nn.init.constant_(first.bias, 100.0)
        loss_of(model, batch(ddp.rank, step)).backward()


def where():
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.text, self.image, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, text, image):
        h = self.text(text)
        if image is not None:  # HERE
            h = h + self.image(image)
        return self.head(h.relu())


@planted("data_dependent_branch", [2], n=3, marked=True, family="branch", origin="bug reports 2026-11-23")
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
