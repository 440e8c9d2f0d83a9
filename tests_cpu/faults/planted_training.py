"""Planted: training with DDP and FSDP in which one rank does otherwise."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch import nn

from pytest_nsa.fixtures import DDP, FSDP
from tests_cpu.faults.planting import (
    AT,
    Block,
    Net,
    batch,
    loss_of,
    net,
    planted,
    train,
)


def inner(model: nn.Module) -> Net:
    """What DDP wraps."""
    assert isinstance(model.module, Net)
    return model.module


@planted("skipped_collective", [1], reason="swallowed")
def test_an_exception_in_forward_is_swallowed(ddp: DDP) -> None:
    model = ddp.wrap(net())
    for step in range(6):
        if step == AT and ddp.rank == 1:
            inner(model).blocks[1].fault = lambda: 1 / 0
        with contextlib.suppress(ZeroDivisionError):
            loss_of(model, batch(ddp.rank, step)).backward()
        inner(model).blocks[1].fault = lambda: None


@planted("skipped_collective", [0], reason="NaN")
def test_a_batch_with_nan_is_skipped(ddp: DDP) -> None:
    model = ddp.wrap(net())
    for step in range(6):
        x = batch(ddp.rank, step)
        if step == AT and ddp.rank == 0:
            x = x * float("nan")
        loss = loss_of(model, x)
        if torch.isnan(loss):
            continue
        loss.backward()


@planted("skipped_collective", [2], n=4, reason="NaN")
def test_a_batch_with_nan_is_skipped_of_four(ddp: DDP) -> None:
    model = ddp.wrap(net())
    for step in range(6):
        x = batch(ddp.rank, step) * (float("nan") if step == AT and ddp.rank == 2 else 1)
        loss = loss_of(model, x)
        if not torch.isnan(loss):
            loss.backward()


@planted("skipped_collective", [1], reason="no_sync")
def test_no_sync_on_one_rank(ddp: DDP) -> None:
    model = ddp.wrap(net())
    for step in range(6):
        context = model.no_sync() if step == AT and ddp.rank == 1 else contextlib.nullcontext()  # type: ignore[operator]
        with context:
            loss_of(model, batch(ddp.rank, step)).backward()


@planted("skipped_collective", [1], reason="left the loop")
def test_fewer_batches_on_one_rank(ddp: DDP) -> None:
    model = ddp.wrap(net())
    for step in range(6 - 2 * ddp.rank):
        loss_of(model, batch(ddp.rank, step)).backward()
    dist.barrier()


@planted("skipped_collective", [0], reason="made fewer steps")
def test_fewer_batches_and_nothing_after(ddp: DDP) -> None:
    model = ddp.wrap(net())
    for step in range(4 + 2 * ddp.rank):
        loss_of(model, batch(ddp.rank, step)).backward()


@planted("extra_collective", [1])
def test_a_collective_in_the_forward_of_one_rank(ddp: DDP) -> None:
    model = ddp.wrap(net())

    def plant() -> None:
        inner(model).blocks[2].fault = lambda: dist.barrier()

    train(model, ddp.rank, culprit=1, before=plant)


@planted("skipped_collective", [1])
def test_a_metric_that_one_rank_does_not_reduce(ddp: DDP) -> None:
    model = ddp.wrap(net())
    for step in range(6):
        loss = loss_of(model, batch(ddp.rank, step))
        loss.backward()
        if not (ddp.rank == 1 and step == AT):
            dist.all_reduce(loss.detach())


@planted("unused_parameters", [1])
def test_a_parameter_is_not_used_on_one_rank(ddp: DDP) -> None:
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


@planted("unused_parameters", [0, 1])
def test_a_parameter_is_never_used(ddp: DDP) -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(8, 1), nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    train(ddp.wrap(Head()), ddp.rank)


@planted("static_graph_changed", [0, 1])
def test_a_static_graph_changes(ddp: DDP) -> None:
    model = ddp.wrap(net(), static_graph=True)
    for step in range(6):
        if step == AT:
            inner(model).blocks = inner(model).blocks[:1]  # type: ignore[assignment]
        loss_of(model, batch(ddp.rank, step)).backward()


@planted("data_dependent_branch", [1])
def test_ranks_take_different_paths(ddp: DDP) -> None:
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


@planted("ready_twice", [0, 1])
def test_reentrant_checkpointing_with_unused_parameters(ddp: DDP) -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True)
            return self.head(x)

    torch.manual_seed(0)
    train(ddp.wrap(Checkpointed(), find_unused_parameters=True), ddp.rank)


@planted("silent_divergence", [0, 1])
def test_a_block_used_twice_under_reentrant_checkpointing(ddp: DDP) -> None:
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


@planted("silent_divergence", [1], reason="changed before that step, by no optimizer, by rank 1")
def test_parameters_are_changed_on_one_rank(ddp: DDP) -> None:
    model = ddp.wrap(net())

    def plant() -> None:
        with torch.no_grad():
            inner(model).blocks[1].sel.weight.add_(0.1)

    train(model, ddp.rank, culprit=1, before=plant)


@planted("silent_divergence", [2], n=3)
def test_another_learning_rate_on_one_rank(ddp: DDP) -> None:
    model = ddp.wrap(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 if ddp.rank != 2 else 0.02)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, batch(ddp.rank, step)).backward()
        optimizer.step()


@planted("nan_loss", [1])
def test_a_loss_is_not_finite(ddp: DDP) -> None:
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
)
def test_a_mean_of_nothing(ddp: DDP) -> None:
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


@planted("nan_loss", [0, 1])
def test_training_blows_up(ddp: DDP) -> None:
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


@planted("skipped_collective", [1])
def test_fsdp_skips_a_batch(fsdp: FSDP) -> None:
    model = fsdp.wrap(net())
    for step in range(6):
        if fsdp.rank == 1 and step == AT:
            continue
        loss_of(model, batch(fsdp.rank, step)).backward()
    dist.barrier()


@planted("rank_exception", [1], where="test_planted.py")
def test_fsdp_raises_on_one_rank(fsdp: FSDP) -> None:
    def plant() -> None:
        raise RuntimeError("no such sample")

    train(fsdp.wrap(net()), fsdp.rank, culprit=1, before=plant)


@planted("lock_deadlock", [0])
def test_fsdp_lock_in_forward(fsdp: FSDP) -> None:
    import threading

    whole = net()
    model = fsdp.wrap(whole)

    def plant() -> None:
        lock = threading.Lock()
        lock.acquire()
        whole.blocks[1].fault = lock.acquire  # type: ignore[assignment]

    train(model, fsdp.rank, culprit=0, before=plant)


@planted("nan_loss", [0])
def test_the_test_itself_looks_for_a_number(ddp: DDP) -> None:
    model = ddp.wrap(net())
    x = batch(ddp.rank, 0) * (float("nan") if ddp.rank == 0 else 1)
    loss = loss_of(model, x)
    assert not torch.isnan(loss)
    loss.backward()


@planted("nan_loss", [1])
def test_a_number_without_a_model(ddp: DDP) -> None:
    loss = torch.tensor(float("inf") if ddp.rank == 1 else 1.0)
    dist.barrier()
    assert torch.isfinite(loss).all()


@planted("extra_collective", [0], n=3)
def test_rank_0_evaluates_the_wrapped_model(ddp: DDP) -> None:
    model = ddp.wrap(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
    for step in range(6):
        loss_of(model, batch(ddp.rank, step)).backward()
        if step == AT:
            if ddp.rank == 0:
                with torch.no_grad():
                    model(batch(0, step))  # broadcasts its buffers
            dist.barrier()


@planted("skipped_collective", [1], n=3)
def test_an_empty_batch_is_skipped_under_fsdp(fsdp: FSDP) -> None:
    model = fsdp.wrap(net())
    for step in range(6):
        x = batch(fsdp.rank, step)[: 0 if (step, fsdp.rank) == (AT, 1) else 4]
        if not len(x):
            continue
        loss_of(model, x).backward()


@planted("silent_divergence", [0, 1], reason="past its DDP wrapper")
def test_everybody_trains_what_is_wrapped(ddp: DDP) -> None:
    model = ddp.wrap(net())
    train(inner(model), ddp.rank)


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


@planted("skipped_collective", [0])
def test_a_recomputation_does_not_reduce_again(ddp: DDP) -> None:
    layer = Remembers(remembers=ddp.rank == 0)
    for step in range(2):
        layer.memory = None
        torch.utils.checkpoint.checkpoint(layer, batch(ddp.rank, step), use_reentrant=False).sum().backward()
        dist.barrier()


@planted("silent_divergence", [0, 1], reason="the values of 0.weight")
def test_the_smaller_of_two_models_diverges(ddp: DDP) -> None:
    large, small = ddp.wrap(net()), ddp.wrap(nn.Sequential(nn.Linear(8, 1)))
    for model in (large, small):
        rate = 0.1 if model is small and ddp.rank == 1 else 0.01
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        for step in range(3):
            loss_of(model, batch(ddp.rank, step)).backward()
            optimizer.step()
