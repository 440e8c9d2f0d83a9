"""Replicas that differ because of what ranks did in a step: updates, rates, reductions, averages."""

from __future__ import annotations

import contextlib
import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from pytest_nsa import check_divergence, fixtures
from tests_cpu.faults.planting import AT, Net, batch, loss_of, net, planted, train
from tests_cpu.faults.replicas import (
    backward,
    batch_of,
    inputs,
    labelled_batch,
    relu_net,
    small,
    small_model,
    train_on_noise,
    two_outputs,
)


def three_outputs():
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


class Adaptive:
    """Sets the rate by what a rank has seen itself, in one of two lines."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self, seen):
        for settings in self.optimizer.param_groups:
            if seen > 1.2:
                settings["lr"] = max(0.001, settings["lr"] / 2)  # HERE
            elif seen < 1.05:
                settings["lr"] = min(1.0, settings["lr"] * 2)  # HERE


@check_divergence
@planted(
    "silent_divergence",
    [2],
    n=3,
    marked=True,
    reason="the optimizer's lr differs",
    family="numbers",
    origin="unseen 2026-11-26",
)
def test_a_rate_by_the_rank_s_own_loss(group):
    model = DDP(three_outputs())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    adaptive = Adaptive(optimizer)
    for step in range(6):
        x, y = labelled_batch(group.rank, step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        adaptive.step(1.5 if group.rank == 2 and step == AT else 1.1)


@check_divergence
@planted(
    "silent_divergence",
    [1],
    n=2,
    marked=True,
    reason="gradients were changed after their reduction, by rank 1",
    family="numbers",
    origin="unseen 2026-11-26",
)
def test_gradients_of_a_bad_batch_are_dropped(group):
    """Of two ranks, the one whose gradients are not as they were reduced."""
    model = DDP(small())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for step in range(7):
        loss = backward(model, optimizer, group.rank, step)
        if loss > 50 or (group.rank == 1 and step == AT):  # HERE
            for parameter in model.parameters():
                parameter.grad.zero_()  # HERE
        optimizer.step()


@check_divergence
@planted(
    "silent_divergence",
    [0, 1, 2],
    n=3,
    marked=True,
    reason="gradients were changed after their reduction",
    family="numbers",
    origin="unseen 2026-11-26",
)
def test_noise_of_each_rank_is_added(group):
    model = DDP(small())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    noise = torch.Generator().manual_seed(5 + group.rank)
    for step in range(6):
        backward(model, optimizer, group.rank, step)
        for parameter in model.parameters():
            parameter.grad += 0.01 * torch.randn(parameter.shape, generator=noise)  # HERE
        optimizer.step()


@check_divergence
@planted(
    "silent_divergence",
    [2],
    n=3,
    marked=True,
    reason="rank 2 loaded a model's parameters",
    family="numbers",
    origin="unseen 2026-11-26",
)
def test_one_rank_goes_back_to_its_best(group):
    model = DDP(small())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    best = {name: value.clone() for name, value in model.module.state_dict().items()}
    for step in range(7):
        loss = backward(model, optimizer, group.rank, step)
        optimizer.step()
        if group.rank == 2 and step == AT and loss > 0:
            model.module.load_state_dict(best)  # HERE


@check_divergence
@planted(
    "silent_divergence",
    [1],
    n=3,
    marked=True,
    reason="rank 1 alone updated the model past its DDP wrapper",
    family="numbers",
    origin="unseen 2026-11-26",
)
def test_a_rate_is_sought_on_one_rank(group):
    model = DDP(small())
    if group.rank == 1:
        probe = torch.optim.SGD(model.module.parameters(), lr=0.01)
        for step in range(2):
            x, y = labelled_batch(1, 50 + step)
            F.cross_entropy(model.module(x), y).backward()  # HERE
            probe.step()  # HERE
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        backward(model, optimizer, group.rank, step)
        optimizer.step()


@planted(
    "silent_divergence", [0, 1, 2], n=3, marked=True, reason="no_sync", family="numbers", origin="unseen 2026-11-25"
)
@check_divergence
def test_ddp_reduces_nothing_at_all(group):
    model = nn.parallel.DistributedDataParallel(relu_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with model.no_sync():
        for step in range(AT):
            optimizer.zero_grad()
            model(inputs(group.rank, step)).square().mean().backward()
            optimizer.step()  # HERE


@planted(
    "silent_divergence",
    [0, 1],
    marked=True,
    reason="the optimizer's lr differs",
    family="numbers",
    origin="unseen 2026-11-26",
)
@check_divergence
def test_each_rank_draws_its_rate(group):
    torch.manual_seed(1)
    model = DDP(nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / (1 + group.rank))  # HERE
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()


# Silent: the loss is computed through the inner module, past DDP's forward, and nothing is averaged
# (swapping-autoencoder-pytorch issue 22).
class ContrastiveTrainer:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.normalize(self.model.module(x), dim=-1)

    def step(self, x: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        first, second = self.encode(x), self.encode(x + 0.01)
        logits = first @ second.T / 0.1
        loss = nn.functional.cross_entropy(logits, torch.arange(len(x)))
        loss.backward()
        self.optimizer.step()
        return loss.item()


@planted("silent_divergence", [0, 1], n=2, family="numbers", origin="swapping-autoencoder-pytorch#22")
def test_contrastive_pairs(ddp):
    trainer = ContrastiveTrainer(ddp.wrap(small_model()))
    for step in range(8):
        x, _ = batch_of(ddp.rank, step)
        assert math.isfinite(trainer.step(x))


# Silent: gradient accumulation that synchronises the first micro-batch and not the last (FunASR PR 3472).
@planted("silent_divergence", [0, 1], n=2, family="numbers", origin="FunASR#3472")
def test_accumulation(ddp):
    accumulate = 3
    model = ddp.wrap(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for index in range(12):
        x, y = batch_of(ddp.rank, index)
        synchronise = index % accumulate == 0
        with contextlib.nullcontext() if synchronise else model.no_sync():
            loss = nn.functional.mse_loss(model(x), y) / accumulate
            loss.backward()
        if (index + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    assert math.isfinite(loss.item())


@planted(
    "silent_divergence",
    [3],
    n=4,
    marked=True,
    reason="the optimizer's lr differs",
    family="numbers",
    origin="unseen 2026-11-25",
)
@check_divergence
def test_a_scheduler_that_steps_by_each_rank_s_own_loss(group):
    model = DDP(two_outputs())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for epoch in range(4):
        train_on_noise(model, optimizer, group.rank, 2, first=2 * epoch)
        scheduler.step(1.0 + epoch if group.rank == 3 else 1.0 / (1 + epoch))  # HERE


@planted(
    "silent_divergence",
    [0, 1],
    marked=True,
    reason="past its DDP wrapper",
    family="numbers",
    origin="unseen 2026-11-25",
)
@check_divergence
def test_a_loss_that_calls_the_model_itself(group):
    model = DDP(two_outputs())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model.module(torch.randn(4, 6, generator=torch.Generator().manual_seed(group.rank)))  # HERE
        loss.square().sum().backward()
        optimizer.step()


def inner(model: nn.Module) -> Net:
    """What DDP wraps."""
    assert isinstance(model.module, Net)
    return model.module


@planted(
    "silent_divergence",
    [1],
    reason="changed before that step, by no optimizer, by rank 1",
    family="numbers",
    origin="first corpus",
)
def test_parameters_are_changed_on_one_rank(ddp: fixtures.DDP) -> None:
    model = ddp.wrap(net())

    def plant() -> None:
        with torch.no_grad():
            inner(model).blocks[1].sel.weight.add_(0.1)

    train(model, ddp.rank, culprit=1, before=plant)


@planted("silent_divergence", [2], n=3, family="numbers", origin="first corpus")
def test_another_learning_rate_on_one_rank(ddp: fixtures.DDP) -> None:
    model = ddp.wrap(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 if ddp.rank != 2 else 0.02)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, batch(ddp.rank, step)).backward()
        optimizer.step()


@planted("silent_divergence", [0, 1], reason="past its DDP wrapper", family="numbers", origin="held out 2026-11-22")
def test_everybody_trains_what_is_wrapped(ddp: fixtures.DDP) -> None:
    model = ddp.wrap(net())
    train(inner(model), ddp.rank)


@planted("silent_divergence", [0, 1], reason="the values of 0.weight", family="numbers", origin="held out 2026-11-22")
def test_the_smaller_of_two_models_diverges(ddp: fixtures.DDP) -> None:
    large, small = ddp.wrap(net()), ddp.wrap(nn.Sequential(nn.Linear(8, 1)))
    for model in (large, small):
        rate = 0.1 if model is small and ddp.rank == 1 else 0.01
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        for step in range(3):
            loss_of(model, batch(ddp.rank, step)).backward()
            optimizer.step()
