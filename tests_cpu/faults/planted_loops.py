"""Planted: training whose loop, step and callbacks lie in functions of their own, and a rank that goes round otherwise."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from pytest_nsa.fixtures import DDP, Group
from tests_cpu.faults.planting import AT, batch, loss_of, net, planted


@planted("extra_collective", [0])
def test_a_barrier_stands_below_the_saving_of_the_first_rank(ddp: DDP) -> None:
    model = ddp.wrap(net())
    is_main = ddp.rank == 0
    for step in range(6):
        loss_of(model, batch(ddp.rank, step)).backward()
        if step == AT and is_main:
            dist.barrier()


class Trainer:
    """With its loop in one function, its step in another, and callbacks in a third."""

    def __init__(self, model: nn.Module, rank: int, after: Callable[[int], None] = lambda step: None) -> None:
        self.model, self.rank, self.after = model, rank, after

    def fit(self, steps: int) -> None:
        for step in range(steps):
            self.step(step)
            self.after(step)

    def step(self, step: int) -> None:
        loss_of(self.model, batch(self.rank, step)).backward()


@planted("extra_collective", [0])
def test_a_callback_of_the_first_rank_has_a_barrier(ddp: DDP) -> None:
    def save(step: int) -> None:
        if step == AT and ddp.rank == 0:
            dist.barrier()

    Trainer(ddp.wrap(net()), ddp.rank, save).fit(6)


@planted("skipped_collective", [1], n=3, reason="left the loop")
def test_one_batch_less_in_a_trainer(ddp: DDP) -> None:
    Trainer(ddp.wrap(net()), ddp.rank).fit(3 if ddp.rank == 1 else 4)
    dist.barrier()


@planted("extra_collective", [1], n=3, reason="another round of the loop")
def test_one_batch_more_in_a_trainer(ddp: DDP) -> None:
    Trainer(ddp.wrap(net()), ddp.rank).fit(4 if ddp.rank == 1 else 3)
    dist.barrier()


@planted("extra_collective", [0], n=3)
def test_the_loss_is_reduced_for_the_log_of_one_rank(ddp: DDP) -> None:
    model = ddp.wrap(net())
    for step in range(6):
        loss = loss_of(model, batch(ddp.rank, step))
        loss.backward()
        if step == AT and ddp.rank == 0:
            dist.all_reduce(loss.detach())


def reduce_and_share(*, skips: bool) -> None:
    dist.all_reduce(torch.ones(2))
    if not skips:
        dist.broadcast(torch.ones(3), src=0)


@planted("skipped_collective", [1])
def test_the_second_call_of_a_function_is_skipped(group: Group) -> None:
    for step in range(6):
        reduce_and_share(skips=group.rank == 1 and step == AT)


@planted("skipped_collective", [1], n=3, reason="left the loop")
def test_one_batch_less_in_an_epoch(ddp: DDP) -> None:
    trainer = Trainer(ddp.wrap(net()), ddp.rank)
    for _ in range(2):
        trainer.fit(3 if ddp.rank == 1 else 4)
        dist.barrier()
