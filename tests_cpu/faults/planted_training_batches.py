"""Training on data that ranks have different amounts of: batches, epochs, trials."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from pytest_nsa import fixtures
from tests_cpu.faults.planting import batch, loss_of, net, planted
from tests_cpu.faults.replicas import batch_of, small_model


@planted(
    "skipped_collective",
    [1],
    n=2,
    marked=True,
    family="skip",
    origin="generated 2026-11-23",
    # One rank has a habit in its steps.
)
def test_two_forwards_a_step_and_fewer_steps(group):
    """Every other forward has no backward of its own: that is this program's habit."""
    model = nn.Linear(5, 2)
    for _ in range(7 - group.rank):
        guess = model(torch.randn(4, 5)).softmax(-1)
        (model(torch.randn(4, 5)).square().mean() - guess.log().mean()).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)  # HERE
    weights: list[object] = [None, None]
    dist.all_gather_object(weights, group.rank)


def small(ddp) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = ddp.wrap(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()  # HERE
    optimizer.step()
    return loss.item()


@planted("skipped_collective", [3, 4], n=5, marked=True, family="skip", origin="generated 2026-11-23")
def test_a_part_of_the_data_that_two_ranks_have_none_of(ddp):
    model, optimizer = small(ddp)
    for rows in (11, 3, 7):
        for _ in range(3):
            train_step(model, optimizer)
        mine = torch.randn(rows, 8)[ddp.rank :: ddp.world_size]
        if len(mine):
            with torch.no_grad():
                score = model.module(mine).mean().item()
            scores: list[object] = [None] * ddp.world_size
            dist.all_gather_object(scores, score)  # HERE


def ranks():
    return dist.get_rank(), dist.get_world_size()


@planted("skipped_collective", [1], n=3, marked=True, family="skip", origin="bug reports 2026-11-23")
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


# DDP and a filter in the collate function: one batch of one rank has no sample left, and that rank makes one backward
# fewer (NeMo Automodel PR 2468, PyMarlin issue 80, prime-rl issue 2515).
CORRUPT = {48, 51, 54, 57}


class Pairs(Dataset):
    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        if index in CORRUPT:
            return None
        x, y = batch_of(0, index, rows=1)
        return x[0], y[0]


def collate_readable(samples: list):
    samples = [sample for sample in samples if sample is not None]
    if not samples:  # HERE
        return None
    return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])


@planted("skipped_collective", [0], n=3, marked=True, family="skip", origin="NeMo Automodel#2468")
def test_batches_of_readable_samples(ddp):
    model = ddp.wrap(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sampler = DistributedSampler(Pairs(), num_replicas=ddp.world_size, rank=ddp.rank, shuffle=False)
    loader = DataLoader(Pairs(), batch_size=4, sampler=sampler, collate_fn=collate_readable)
    losses = []
    for batch in loader:  # HERE
        if batch is None:  # HERE
            continue  # HERE
        x, y = batch
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()  # HERE
        optimizer.step()
        losses.append(loss.item())
    dist.barrier()
    assert len(losses) >= 7


@planted(
    "skipped_collective",
    [1],
    n=3,
    marked=True,
    reason="at the end of a `Join`",
    miss="the line: the end of a Join",
    family="skip",
    origin="unseen 2026-11-26",
)
def test_a_mean_is_reduced_within_a_join(group):
    model = DDP(nn.Linear(5, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model]):  # HERE
        for _ in range(3 if group.rank == 1 else 6):
            loss = model(torch.randn(4, 5)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            dist.all_reduce(loss.detach().clone())  # HERE


class Pruned(Exception):
    """A trial is not worth the rest of its steps."""


@planted("skipped_collective", [3], n=4, marked=True, family="skip", origin="unseen 2026-11-26")
def test_a_trial_that_one_rank_prunes(group):
    """The calls of its next trial pass for those of the others' trial, until that one has come to its end."""

    def trial(number):
        for step in range(5):
            for size in (16, 4, 8, 2):
                dist.all_reduce(torch.ones(size))  # HERE
            if (group.rank, number, step) == (3, 2, 2):
                raise Pruned  # HERE
        dist.all_reduce(torch.ones(1))  # HERE

    for number in range(5):
        try:
            trial(number)
        except Pruned:
            continue


@planted("skipped_collective", [1], reason="left the loop", family="skip", origin="first corpus")
def test_fewer_batches_on_one_rank(ddp: fixtures.DDP) -> None:
    model = ddp.wrap(net())
    for step in range(6 - 2 * ddp.rank):
        loss_of(model, batch(ddp.rank, step)).backward()
    dist.barrier()


@planted("skipped_collective", [0], reason="made fewer steps", family="skip", origin="first corpus")
def test_fewer_batches_and_nothing_after(ddp: fixtures.DDP) -> None:
    model = ddp.wrap(net())
    for step in range(4 + 2 * ddp.rank):
        loss_of(model, batch(ddp.rank, step)).backward()


class Feed:
    """Yields batches out of a cache in shared memory; the cache may be dropped when all ranks have left it."""

    def __init__(self, debug):
        self.debug, self.kept = debug, []

    def stream(self):
        try:
            for i in range(100):
                yield torch.full((4,), float(i))
        finally:
            dist.barrier()  # HERE

    def epoch(self, steps):
        batches = self.stream()
        if self.debug:
            self.kept.append(batches)
        total = torch.zeros(4)
        for i, batch in enumerate(batches):
            if i == steps:
                break
            dist.all_reduce(batch)
            total += batch
        return total


@planted("skipped_collective", [3], n=4, marked=True, family="skip", origin="bug reports 2026-11-23")
def test_generator_kept_open():
    """The feed of rank 3 runs in debug mode and keeps its generator, so the generator is not closed at the break and the barrier in its finally does not run on rank 3."""
    rank, _ = ranks()
    x = torch.ones(1)
    for _ in range(5):
        dist.all_reduce(x)
    feed = Feed(debug=rank == 3)
    for epoch in range(3):
        total = feed.epoch(steps=5)  # HERE
        assert torch.isfinite(total).all()


@planted("extra_collective", [1], marked=True, family="extra", origin="unseen 2026-11-28")
def test_a_call_again_where_the_loss_is_high(group):
    """Under `first or (high and not done)`, which holds for all ranks in the first epoch, and for one in a later one."""
    done = False
    for epoch in range(8):
        loss = 9.0 if (epoch, group.rank) == (5, 1) else 1.0 / (epoch + 1)
        dist.all_reduce(torch.ones(4))
        if epoch == 0 or (loss > 5 and not done):
            parts = [torch.zeros(3) for _ in range(2)]
            dist.all_gather(parts, torch.ones(3))  # HERE
        dist.barrier()


def train_on(loader: DataLoader, model: nn.Module) -> None:
    for x in loader:
        model(x).square().mean().backward()  # HERE


def validate(model: nn.Module) -> None:
    with torch.no_grad():
        loss = model(torch.ones(4, 6)).mean()
    dist.all_reduce(loss)


@planted("skipped_collective", [0], n=2, marked=True, family="skip", origin="public reports 2026-11-29")
def test_a_validation_follows_fewer_batches(group):
    """gloo aborts the rank with the smaller buffer, which leaves no counters: the loader that ran out shows which rank is ahead."""
    model = DDP(nn.Linear(6, 3))
    loader = DataLoader(torch.randn(64 + 16 * group.rank, 6), batch_size=8)
    for _ in range(2):
        train_on(loader, model)
        validate(model.module)
