"""Programs in which values, gradients or replicas become wrong."""

from __future__ import annotations

import contextlib
import io
import logging
import math

import torch
import torch.distributed as dist
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


@planted(2, rank=1)
def test_a_loss_is_not_finite(ddp: fixtures.DDP, culprit: int) -> None:
    model = ddp.wrap(net())
    for step in range(6):
        x = batch(ddp.rank, step) * (float("inf") if step == AT and ddp.rank == culprit else 1)
        loss = loss_of(model, x)
        loss.backward()
        assert torch.isfinite(loss)


@planted(2, rank=1)
def test_a_mean_of_nothing(ddp: fixtures.DDP, culprit: int) -> None:
    """The test passes: nothing in it looks at a loss, or at what is left of the model."""
    model = ddp.wrap(nn.Linear(8, 20))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        labels = torch.arange(6)
        labels[: 6 if ddp.rank == culprit and step == AT else 2] = -100  # a prompt as long as its row
        mask = labels != -100
        optimizer.zero_grad()
        each = nn.functional.cross_entropy(model(torch.randn(6, 8)), labels.clamp(min=0), reduction="none")
        ((each * mask).sum() / mask.sum()).backward()
        optimizer.step()
    dist.barrier()


@planted(2, rank=0)
def test_the_test_itself_looks_for_a_number(ddp: fixtures.DDP, culprit: int) -> None:
    model = ddp.wrap(net())
    x = batch(ddp.rank, 0) * (float("nan") if ddp.rank == culprit else 1)
    loss = loss_of(model, x)
    assert not torch.isnan(loss)
    loss.backward()


@planted(2, rank=1)
def test_a_number_without_a_model(ddp: fixtures.DDP, culprit: int) -> None:
    loss = torch.tensor(float("inf") if ddp.rank == culprit else 1.0)
    dist.barrier()
    assert torch.isfinite(loss).all()


def mean_in_one(parameters: list[nn.Parameter]) -> None:
    """Average the gradients in one tensor, in the order of ``parameters``."""
    flat = torch.cat([p.grad.reshape(-1) for p in parameters])
    dist.all_reduce(flat)
    for p, part in zip(
        parameters, flat.div_(dist.get_world_size()).split([p.numel() for p in parameters]), strict=True
    ):
        p.grad.copy_(part.view_as(p))


@check_divergence
@planted(3, rank=1)
def test_parameters_in_another_order_on_one_rank(group, culprit):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(3)], nn.Linear(8, 1))
    parameters = list(model.parameters())
    if group.rank == culprit:
        parameters[0], parameters[1] = parameters[1], parameters[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, batch(group.rank, step)).backward()
        mean_in_one(parameters)
        optimizer.step()


def reduce_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


@check_divergence
@planted(3)
def test_replicas_that_are_made_from_other_seeds(group, faulty):
    """Gradients are averaged by hand, and nothing makes the replicas equal before."""
    torch.manual_seed(42 + (group.rank if faulty else 0))
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))  # HERE
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        reduce_gradients(model)
        optimizer.step()


# Silent: rank 0 loads the checkpoint after the model is wrapped, in the belief that DDP broadcasts it
# (vllm-project/speculators PR 926: only rank 0 loads).
def pretrained_weights() -> bytes:
    model = small_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    return buffer.getvalue()


def restore(model: nn.Module, checkpoint: bytes, is_sent: bool) -> None:
    if is_sent:
        return  # DDP sends it to the others
    state = torch.load(io.BytesIO(checkpoint), weights_only=True)
    model.module.load_state_dict(state)


@planted(3)
def test_restore_after_wrapping(ddp, faulty):
    model = ddp.wrap(small_model())
    restore(model, pretrained_weights(), is_sent=faulty and ddp.rank != 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(8):
        x, y = batch_of(ddp.rank, step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    assert math.isfinite(loss.item())


state_log = logging.getLogger("states")


@check_divergence
@planted(3, rank=2)
def test_an_optimizer_s_state_that_cannot_be_loaded(group, culprit):
    net = two_outputs()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    train_on_noise(DDP(net), optimizer, group.rank, 4)
    state = optimizer.state_dict()
    if group.rank == culprit:
        state["param_groups"] = state["param_groups"] * 2
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    try:
        optimizer.load_state_dict(state)  # HERE
    except ValueError as error:
        state_log.warning("starts with a fresh optimizer: %s", error)
    train_on_noise(DDP(net), optimizer, group.rank, 3, first=4)


@check_divergence
@planted(3, rank=1)
def test_a_rank_loads_an_older_model_after_ddp_was_made(group, tmp_path, culprit):
    net = two_outputs()
    for age in (1, 2):
        torch.save({name: value / age for name, value in net.state_dict().items()}, tmp_path / f"{group.rank}-{age}.pt")
    model = DDP(net)
    newest = 2 if group.rank == culprit else 1
    model.module.load_state_dict(torch.load(tmp_path / f"{group.rank}-{newest}.pt"))  # HERE
    train_on_noise(model, torch.optim.SGD(model.parameters(), lr=0.05), group.rank, 3)


@check_divergence
@planted(3)
def test_a_head_that_is_put_in_after_ddp_was_made(group, faulty):
    net = two_outputs()
    early = DDP(net) if faulty else None
    net[2] = nn.Sequential(net[2], nn.Linear(2, 3))  # HERE
    model = early or DDP(net)
    train_on_noise(model, torch.optim.SGD(model.parameters(), lr=0.1), group.rank, 3)


@check_divergence
@planted(3, rank=2)
def test_one_rank_goes_back_to_its_best(group, culprit):
    model = DDP(small())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    best = {name: value.clone() for name, value in model.module.state_dict().items()}
    for step in range(7):
        loss = backward(model, optimizer, group.rank, step)
        optimizer.step()
        if group.rank == culprit and step == AT and loss > 0:
            model.module.load_state_dict(best)  # HERE


@check_divergence
@planted(3, rank=1)
def test_a_rate_is_sought_on_one_rank(group, culprit):
    model = DDP(small())
    if group.rank == culprit:
        probe = torch.optim.SGD(model.module.parameters(), lr=0.01)
        for step in range(2):
            x, y = labelled_batch(1, 50 + step)
            F.cross_entropy(model.module(x), y).backward()  # HERE
            probe.step()  # HERE
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        backward(model, optimizer, group.rank, step)
        optimizer.step()


@check_divergence
@planted(3)
def test_ddp_reduces_nothing_at_all(group, faulty):
    model = nn.parallel.DistributedDataParallel(relu_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with model.no_sync() if faulty else contextlib.nullcontext():
        for step in range(AT):
            optimizer.zero_grad()
            model(inputs(group.rank, step)).square().mean().backward()
            optimizer.step()  # HERE


# Silent: gradient accumulation that synchronises the first micro-batch and not the last (FunASR PR 3472).
@planted(2)
def test_accumulation(ddp, faulty):
    accumulate = 3
    model = ddp.wrap(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for index in range(12):
        x, y = batch_of(ddp.rank, index)
        synchronise = index % accumulate == (0 if faulty else accumulate - 1)
        with contextlib.nullcontext() if synchronise else model.no_sync():
            loss = nn.functional.mse_loss(model(x), y) / accumulate
            loss.backward()
        if (index + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    assert math.isfinite(loss.item())


@check_divergence
@planted(4, rank=3)
def test_a_scheduler_that_steps_by_each_rank_s_own_loss(group, culprit):
    model = DDP(two_outputs())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for epoch in range(4):
        train_on_noise(model, optimizer, group.rank, 2, first=2 * epoch)
        scheduler.step(1.0 + epoch if group.rank == culprit else 1.0 / (1 + epoch))  # HERE


def inner(model: nn.Module) -> Net:
    """What DDP wraps."""
    assert isinstance(model.module, Net)
    return model.module


@planted(2, rank=1)
def test_parameters_are_changed_on_one_rank(ddp: fixtures.DDP, culprit: int) -> None:
    model = ddp.wrap(net())

    def plant() -> None:
        with torch.no_grad():
            inner(model).blocks[1].sel.weight.add_(0.1)

    train(model, ddp.rank, culprit=culprit, before=plant)


@planted(3, rank=2)
def test_another_learning_rate_on_one_rank(ddp: fixtures.DDP, culprit: int) -> None:
    model = ddp.wrap(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 if ddp.rank != culprit else 0.02)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, batch(ddp.rank, step)).backward()
        optimizer.step()


@planted(2, rank=1)
def test_the_smaller_of_two_models_diverges(ddp: fixtures.DDP, culprit: int) -> None:
    large, small = ddp.wrap(net()), ddp.wrap(nn.Sequential(nn.Linear(8, 1)))
    for model in (large, small):
        rate = 0.1 if model is small and ddp.rank == culprit else 0.01
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        for step in range(3):
            loss_of(model, batch(ddp.rank, step)).backward()
            optimizer.step()


log = logging.getLogger("trainer")


# Silent: a spike of the loss makes a rank skip its optimizer's step, by its own loss and after the gradients have been
# averaged (WeatherGenerator PR 2718).
class SpikeGuard:
    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.average: float | None = None

    def is_spike(self, loss: float) -> bool:
        spike = self.average is not None and loss > self.factor * self.average
        if not spike:
            self.average = loss if self.average is None else 0.9 * self.average + 0.1 * loss
        return spike


@planted(4, rank=2)
def test_spikes_are_skipped(ddp, culprit):
    model = ddp.wrap(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    guard = SpikeGuard(factor=6.0)
    for step in range(10):
        x, y = batch_of(ddp.rank, step)
        if (ddp.rank, step) == (culprit, 5):
            y = y * 20  # one wrong unit in its data
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        if guard.is_spike(loss.item()):
            log.warning("step %d: loss %g, skipped", step, loss.item())
            continue  # without a step
        optimizer.step()
    assert math.isfinite(loss.item())


def make(seed=0):
    torch.manual_seed(seed)
    net = nn.Linear(6, 3)
    return DDP(net), torch.optim.SGD(net.parameters(), lr=0.1)


def step_of(model, optimizer, step):
    optimizer.zero_grad()
    model(torch.full((2, 6), step + 1.0)).square().mean().backward()
    optimizer.step()


@check_divergence
@planted(3, rank=1)
def test_weights_are_rounded_on_one_rank_and_the_test_compares_them(group, culprit):
    model, optimizer = make()
    for step in range(5):
        step_of(model, optimizer, step)
        if group.rank == culprit and step == AT:
            with torch.no_grad():
                model.module.weight.copy_(model.module.weight.bfloat16())
    low, high = model.module.weight.sum().detach().clone(), model.module.weight.sum().detach().clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    assert low == high


@check_divergence
@planted(2)
def test_a_rate_at_which_the_weights_overflow(group, faulty):
    model, optimizer = make()
    for group_ in optimizer.param_groups:
        group_["lr"] = 1e20 if faulty else 0.1
    for step in range(5):
        step_of(model, optimizer, step)
    dist.barrier()


@check_divergence
@planted(2, rank=0)
def test_one_rank_clips_its_gradients_after_they_are_reduced(group, culprit):
    model, optimizer = make()
    for step in range(6):
        optimizer.zero_grad()
        model(torch.full((2, 6), step + 1.0)).square().mean().backward()
        if group.rank == culprit and step == AT:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
