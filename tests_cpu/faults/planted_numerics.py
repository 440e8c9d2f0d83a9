"""Losses and values that are not finite."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from pytest_nsa import fixtures
from tests_cpu.faults.planting import AT, batch, loss_of, net, planted


def small():
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def labelled_batch(rank, step):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(6, 6, generator=generator), torch.randint(0, 3, (6,), generator=generator)


@planted("nan_loss", [1], n=2, marked=True, family="numbers", origin="unseen 2026-11-26")
def test_no_label_is_left_in_a_batch(group):
    model = DDP(small())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        x, y = labelled_batch(group.rank, step)
        counts = torch.zeros(6) if group.rank == 1 and step == AT else torch.ones(6)
        loss = (F.cross_entropy(model(x), y, reduction="none") * counts).sum() / counts.sum()  # HERE
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert torch.isfinite(loss)


@planted("nan_loss", [1], family="numbers", origin="first corpus")
def test_a_loss_is_not_finite(ddp: fixtures.DDP) -> None:
    model = ddp.wrap(net())
    for step in range(6):
        x = batch(ddp.rank, step) * (float("inf") if step == AT and ddp.rank == 1 else 1)
        loss = loss_of(model, x)
        loss.backward()
        assert torch.isfinite(loss)


@planted(
    "nan_loss",
    [1],
    reason="the loss of step 4 is nan on rank 1; from step 4 on 2 parameters (weight, ...) are not finite",
    family="numbers",
    origin="network",
)
def test_a_mean_of_nothing(ddp: fixtures.DDP) -> None:
    """The test passes: nothing in it looks at a loss, or at what is left of the model."""
    model = ddp.wrap(nn.Linear(8, 20))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        labels = torch.arange(6)
        labels[: 6 if ddp.rank == 1 and step == AT else 2] = -100  # a prompt as long as its row
        mask = labels != -100
        optimizer.zero_grad()
        each = nn.functional.cross_entropy(model(torch.randn(6, 8)), labels.clamp(min=0), reduction="none")
        ((each * mask).sum() / mask.sum()).backward()
        optimizer.step()
    dist.barrier()


@planted("nan_loss", [0, 1], family="numbers", origin="first corpus")
def test_training_blows_up(ddp: fixtures.DDP) -> None:
    model = ddp.wrap(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e12)
    losses = []
    for step in range(6):
        optimizer.zero_grad()
        loss = loss_of(model, batch(0, step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@planted("nan_loss", [0], family="numbers", origin="first corpus")
def test_the_test_itself_looks_for_a_number(ddp: fixtures.DDP) -> None:
    model = ddp.wrap(net())
    x = batch(ddp.rank, 0) * (float("nan") if ddp.rank == 0 else 1)
    loss = loss_of(model, x)
    assert not torch.isnan(loss)
    loss.backward()


@planted("assertion", [1], family="numbers", origin="first corpus")
def test_a_number_without_a_model(ddp: fixtures.DDP) -> None:
    loss = torch.tensor(float("inf") if ddp.rank == 1 else 1.0)
    dist.barrier()
    assert torch.isfinite(loss).all()
