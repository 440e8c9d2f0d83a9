"""A call once more or once less, which only the rounds so far or the way to the call tell apart: helpers that several places call,
loops within loops, attempts, groups, sends and receives. HERE marks the lines that a verdict may name.

After programs whose authors had not read the rules, and generated ones.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests_cpu.faults.planting import AT, planted


class Meter:
    def __init__(self) -> None:
        self.values = torch.zeros(3)

    def sync(self) -> torch.Tensor:
        dist.all_reduce(self.values)  # HERE
        return self.values / dist.get_world_size()


def evaluate(meter: Meter, samples: int) -> None:
    seen = torch.tensor([samples])
    dist.all_reduce(seen)
    meter.sync()


def small(ddp) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = ddp.wrap(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()  # HERE
    optimizer.step()
    return loss.item()


@planted("extra_collective", [0], n=3, marked=True)
def test_a_helper_is_called_from_a_second_place(group):
    meter, norm = Meter(), torch.ones(1)
    for step in range(6):
        evaluate(meter, 8)
        dist.all_reduce(norm, op=dist.ReduceOp.MAX)
        if (group.rank, step) == (0, AT):
            meter.sync()  # HERE
        dist.broadcast(norm, 0)


@planted("extra_collective", [1, 2], n=5, marked=True)
def test_a_call_at_the_end_of_a_round(group):
    many = torch.ones(100)
    for step in range(6):
        dist.barrier()
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(many)
        if group.rank in (1, 2) and step == AT:
            dist.all_reduce(many)  # HERE


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


@planted("extra_collective", [1], n=3, marked=True)
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


@planted("extra_collective", [0], n=4, marked=True)
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


@planted("skipped_collective", [3, 4], n=5, marked=True)
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


@planted("skipped_collective", [1], n=2, marked=True)
def test_a_report_that_comes_a_step_late(ddp):
    model, optimizer = small(ddp)
    seen = 0
    for step in range(12):
        train_step(model, optimizer)
        if ddp.rank == 1 and step == 4:
            continue  # an outlier: it is not counted
        seen += 1
        if seen % 3 == 0:
            report: list[object] = [None] * ddp.world_size
            dist.all_gather_object(report, step)  # HERE


@planted("skipped_collective", [1], n=4, marked=True)
def test_a_name_that_one_rank_has_not(ddp):
    """After it the rank is a call ahead: DDP's own call of the next step is no sign that the loop has not come round."""
    model, optimizer = small(ddp)
    for step in range(6):
        train_step(model, optimizer)
        names = ["loss", "accuracy"] + ["length"] * ((ddp.rank, step) != (1, AT))
        for _ in names:
            dist.all_reduce(torch.ones(1))  # HERE


class Cut(Exception):
    pass


def trial(ddp, bad: int) -> None:
    model, optimizer = small(ddp)  # HERE
    for step in range(4):
        if step == bad:
            raise Cut
        train_step(model, optimizer)


@planted("skipped_collective", [0], n=3, marked=True)
def test_a_trial_is_cut_on_one_rank(ddp):
    for number in range(4):
        try:
            trial(ddp, bad=2 if (ddp.rank, number) == (0, 2) else -1)
        except Cut:
            continue


@planted("skipped_collective", [4], n=5, marked=True)
def test_the_last_call_of_a_round_of_two_groups(group):
    mine = [dist.new_group([0, 1]), dist.new_group([2, 3, 4])][group.rank >= 2]
    for step in range(6):
        dist.all_reduce(torch.ones(2), group=mine)
        dist.broadcast(torch.ones(3), 0)
        if (group.rank, step) != (4, AT):
            dist.barrier()  # HERE


def ring(group, x: torch.Tensor) -> torch.Tensor:
    sent = dist.isend(x, (group.rank + 1) % group.world_size)
    got = torch.empty_like(x)
    dist.recv(got, (group.rank - 1) % group.world_size)
    sent.wait()
    return got


@planted("skipped_collective", [1], n=4, marked=True)
def test_a_call_before_a_ring(group):
    meter = Meter()
    for step in range(6):
        ring(group, torch.ones(4))
        evaluate(meter, 8)
        if (group.rank, step) != (1, AT):
            dist.all_reduce(torch.ones(100))  # HERE


@planted("extra_collective", [0], n=3, marked=True)
def test_a_call_within_a_ring_s_round(group):
    parts = [torch.zeros(2) for _ in range(3)]
    for step in range(6):
        dist.all_gather(parts, torch.ones(2))
        if (group.rank, step) == (0, AT):
            dist.all_gather(parts, torch.ones(2))  # HERE
        ring(group, torch.ones(4))
        dist.all_reduce(torch.ones(100))


def exchange(block: torch.Tensor, around) -> torch.Tensor:
    """The number of a rank within its group is taken for its number among all."""
    me, size = dist.get_rank(around), dist.get_world_size(around)
    got = torch.empty_like(block)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, block, (me + 1) % size),  # HERE
            dist.P2POp(dist.irecv, got, (me - 1) % size),
        ]
    )
    for work in works:
        work.wait()  # HERE
    return got


@planted("p2p_unmatched", [2, 3], n=4, marked=True)
def test_numbers_within_a_group(group):
    around = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context")).get_group("context")
    for step in range(6):
        block = torch.randn(4, 8)
        if step >= AT:
            block = exchange(block, around)
        dist.all_reduce(block.norm())


class Tracker:
    """Reduces what four steps gave, over all ranks, where the last stage alone has something."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def add(self, value: float) -> None:
        self.values.append(value)
        if len(self.values) % 4 == 0:
            dist.all_reduce(torch.tensor([sum(self.values)]))  # HERE


@planted("extra_collective", [4, 5], n=6, marked=True)
def test_the_last_stage_reduces_over_all(group):
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("stage", "data"))
    stage, data, tracker = mesh.get_local_rank("stage"), mesh.get_group("data"), Tracker()
    for _ in range(12):
        h = torch.randn(4, 8)
        if stage > 0:
            dist.recv(h, group.rank - 2)
        if stage < 2:
            dist.send(h, group.rank + 2)
        else:
            tracker.add(h.norm().item())  # HERE
        dist.all_reduce(h, group=data)
        dist.all_reduce(h.norm().reshape(1))


@planted("infinite_loop", [2], n=3, marked=True)
def test_draws_until_one_is_allowed(group):
    weights = torch.tensor([0.0, 0.5, 0.5])
    for step in range(6):
        forbidden = (1, 2) if (group.rank, step) == (2, AT) else (0,)
        while True:
            token = int(torch.multinomial(weights, 1))  # HERE
            if token not in forbidden:  # HERE
                break
        dist.all_reduce(torch.tensor([token]))


@planted("rank_exception", [2], n=4, marked=True, reason="on rank 2, for which every rank raises CheckpointException")
def test_a_part_of_a_checkpoint_is_gone(group, tmp_path):
    """torch raises on all ranks; which of them could not load is in the text alone."""
    shared = tmp_path.parent / "checkpoint"
    state = {"step": torch.tensor(0), f"experts.{group.rank}": torch.randn(8, 8)}
    dcp.save(state, checkpoint_id=str(shared))
    if group.rank == 2:
        for name in os.listdir(shared):
            if name.startswith("__2_"):
                os.remove(shared / name)
    dist.barrier()
    dcp.load(state, checkpoint_id=str(shared))  # HERE
