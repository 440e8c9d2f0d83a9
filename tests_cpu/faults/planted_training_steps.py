"""Training with DDP or FSDP: one rank does a step differently."""

from __future__ import annotations

import contextlib
import functools
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import softplus
from torch.nn.parallel import DistributedDataParallel as DDP

from pytest_nsa import fixtures
from pytest_nsa.fixtures import FSDP
from tests_cpu.faults.planting import AT, Net, batch, loss_of, net, planted, train


def small(ddp) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = ddp.wrap(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()  # HERE
    optimizer.step()
    return loss.item()


def attempts(times: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def tried(*args: Any) -> None:
            for _ in range(times):
                try:
                    return function(*args)
                except OSError:
                    args[0].mkdir(exist_ok=True)
            raise OSError("no attempt is left")

        return tried

    return decorate


@attempts(3)
def export(folder: Path, step: int) -> None:
    losses: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(losses, step)  # HERE
    (folder / f"{step}.txt").write_text(repr(losses))


@planted("extra_collective", [1], n=3, marked=True, family="extra", origin="generated 2026-11-23")
def test_an_attempt_more_gathers_again(ddp, tmp_path):
    model, optimizer = small(ddp)
    folder = tmp_path / f"export{ddp.rank}"
    for step in range(9):
        train_step(model, optimizer)
        if step % 3 == 2:
            if ddp.rank != 1 or step < 4:
                folder.mkdir(exist_ok=True)
            export(folder, step)
        elif ddp.rank == 1 and step == 4:
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()


class Agreed:
    """A loader whose passes begin with a number that all ranks know."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        seeds: list[object] = [None] * dist.get_world_size()
        dist.all_gather_object(seeds, 1)  # HERE
        yield from torch.randn(2, 4, 8)


@planted("extra_collective", [0], n=4, marked=True, family="extra", origin="generated 2026-11-23")
def test_a_look_at_the_first_batch(ddp):
    model, optimizer = small(ddp)
    held_out = Agreed()
    for epoch in range(3):
        for _ in range(3):
            train_step(model, optimizer)
        if ddp.rank == 0 and epoch == 1:
            next(iter(held_out))  # HERE
        for batch in held_out:
            with torch.no_grad():
                error = model.module(batch).square().mean()
            dist.all_reduce(error)


@planted("extra_collective", [0], n=2, marked=True, family="extra", origin="unseen 2026-11-26")
def test_a_sample_is_drawn_on_one_rank_under_fsdp(group):
    """Its gathers meet those of the other's next step for a while."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(1, 9):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 4 == 0 and group.rank == 0:  # HERE
            with torch.no_grad():
                for _ in range(3):
                    model(torch.randn(1, 8))  # HERE


@planted("extra_collective", [2], n=3, marked=True, family="extra", origin="unseen 2026-11-24")
def test_a_forward_more_sends_its_buffers(group, ddp):
    """DDP broadcasts the buffers of a batch norm in each forward in training mode: one more is a call more."""
    model = ddp.wrap(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(7):
        data = torch.randn(8, 4)
        loss = model(data).pow(2).mean()
        if (group.rank, step) == (2, AT):
            model(data.abs())  # HERE
        loss.backward()  # HERE
        optimizer.step()
        optimizer.zero_grad()


class Augment:
    """Mixes batches of all ranks by one stream of random numbers."""

    def __init__(self):
        self.random = random.Random(0)

    def sample(self):
        return self.random.random()  # HERE

    def __call__(self, x):
        if self.random.random() < 0.5:
            dist.all_gather([torch.empty_like(x) for _ in range(3)], x)  # HERE


@planted("extra_collective", [1], n=3, marked=True, family="extra", origin="unseen 2026-11-26")
def test_one_draw_more_from_a_stream_that_all_share(group):
    """Its call comes after fewer of the others' than before, and in the same round of the loop."""
    augment = Augment()
    model = DDP(nn.Linear(6, 3))
    for step in range(12):
        augment(torch.randn(5, 6))
        model(torch.randn(5, 6)).sum().backward()
        if step == 3 and group.rank == 1:
            augment.sample()


def inner(model: nn.Module) -> Net:
    """What DDP wraps."""
    assert isinstance(model.module, Net)
    return model.module


@planted("extra_collective", [1], family="extra", origin="first corpus", miss="two ranks of one kind")
def test_a_collective_in_the_forward_of_one_rank(ddp: fixtures.DDP) -> None:
    model = ddp.wrap(net())

    def plant() -> None:
        inner(model).blocks[2].fault = lambda: dist.barrier()

    train(model, ddp.rank, culprit=1, before=plant)


class Cut(Exception):
    pass


def trial(ddp, bad: int) -> None:
    model, optimizer = small(ddp)  # HERE
    for step in range(4):
        if step == bad:
            raise Cut
        train_step(model, optimizer)


@planted("skipped_collective", [0], n=3, marked=True, family="skip", origin="generated 2026-11-23")
def test_a_trial_is_cut_on_one_rank(ddp):
    for number in range(4):
        try:
            trial(ddp, bad=2 if (ddp.rank, number) == (0, 2) else -1)
        except Cut:
            continue


class Narrow(nn.Module):
    """Has no memory for long rows."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 30), nn.Linear(30, 6)

    def forward(self, x):
        h = self.first(x)
        if len(x) > 50:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
        return self.last(h)


@planted(
    "skipped_collective",
    [1],
    n=3,
    marked=True,
    reason="forward aborted by a swallowed exception",
    family="skip",
    origin="unseen 2026-11-26",
)
def test_the_last_batch_finds_no_memory(group):
    """No forward comes after the one that was aborted: it is known when it happens."""
    # The others reduce in their backward, which rank 1 does not reach.
    model = DDP(Narrow())
    for step in range(6):
        try:
            x = torch.randn(60 if group.rank == 1 and step == 5 else 8, 6)
            model(x).sum().backward()  # HERE
        except RuntimeError as error:
            print(f"step {step} is left out: {error}")
    dist.all_reduce(torch.ones(2, dtype=torch.float64))


class Batches(nn.Module):
    """Raises for a batch that is too large."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 2)

    def forward(self, x):
        if len(x) > 64:
            raise MemoryError("out of memory")
        return self.out(x)


@planted(
    "skipped_collective", [1], n=3, marked=True, reason="swallowed", family="skip", origin="public reports 2026-11-25"
)
def test_a_batch_too_large_is_passed_over(group):
    model = DDP(Batches())
    for step in range(6):
        try:
            model(torch.randn(100 if (group.rank, step) == (1, 3) else 8, 4)).sum().backward()  # HERE
        except MemoryError:
            continue  # HERE
        dist.all_reduce(torch.ones(3))


@planted("skipped_collective", [3], n=4, marked=True, family="skip", origin="unseen 2026-11-26")
def test_a_discriminator_that_pauses_where_it_is_good(group):
    """Gloo ends a rank over the other model's gradients; where the others were they wrote down as they raised."""
    one, two = DDP(nn.Linear(6, 10)), DDP(nn.Linear(10, 1))
    for step in range(8):
        loss = softplus(-two(torch.randn(4, 10))).mean()
        if (group.rank, step) != (3, 4):
            loss.backward()  # HERE
        one(torch.randn(4, 6)).sum().backward()


@planted("skipped_collective", [1], reason="swallowed", family="skip", origin="first corpus")
def test_an_exception_in_forward_is_swallowed(ddp: fixtures.DDP) -> None:
    model = ddp.wrap(net())
    for step in range(6):
        if step == AT and ddp.rank == 1:
            inner(model).blocks[1].fault = lambda: 1 / 0
        with contextlib.suppress(ZeroDivisionError):
            loss_of(model, batch(ddp.rank, step)).backward()
        inner(model).blocks[1].fault = lambda: None


@planted("skipped_collective", [0], reason="NaN", family="skip", origin="first corpus")
def test_a_batch_with_nan_is_skipped(ddp: fixtures.DDP) -> None:
    model = ddp.wrap(net())
    for step in range(6):
        x = batch(ddp.rank, step)
        if step == AT and ddp.rank == 0:
            x = x * float("nan")
        loss = loss_of(model, x)
        if torch.isnan(loss):
            continue
        loss.backward()


@planted("skipped_collective", [2], n=4, reason="NaN", family="skip", origin="first corpus")
def test_a_batch_with_nan_is_skipped_of_four(ddp: fixtures.DDP) -> None:
    model = ddp.wrap(net())
    for step in range(6):
        x = batch(ddp.rank, step) * (float("nan") if step == AT and ddp.rank == 2 else 1)
        loss = loss_of(model, x)
        if not torch.isnan(loss):
            loss.backward()


@planted("skipped_collective", [1], reason="no_sync", family="skip", origin="first corpus")
def test_no_sync_on_one_rank(ddp: fixtures.DDP) -> None:
    model = ddp.wrap(net())
    for step in range(6):
        context = model.no_sync() if step == AT and ddp.rank == 1 else contextlib.nullcontext()  # type: ignore[operator]
        with context:
            loss_of(model, batch(ddp.rank, step)).backward()


@planted("skipped_collective", [1], family="skip", origin="first corpus")
def test_fsdp_skips_a_batch(fsdp: FSDP) -> None:
    model = fsdp.wrap(net())
    for step in range(6):
        if fsdp.rank == 1 and step == AT:
            continue
        loss_of(model, batch(fsdp.rank, step)).backward()
    dist.barrier()


@planted("skipped_collective", [1], n=3, family="skip", origin="held out 2026-11-22")
def test_an_empty_batch_is_skipped_under_fsdp(fsdp: FSDP) -> None:
    model = fsdp.wrap(net())
    for step in range(6):
        x = batch(fsdp.rank, step)[: 0 if (step, fsdp.rank) == (AT, 1) else 4]
        if not len(x):
            continue
        loss_of(model, x).backward()


def where():
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def mlp(width=16, depth=2):
    return nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())])


@planted("skipped_collective", [0], n=3, marked=True, family="skip", origin="bug reports 2026-11-23")
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
