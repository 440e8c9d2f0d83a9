"""Collectives that return at once and stall later, as NCCL's do: a rank is blocked where it asks the device for a result."""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist

from pytest_nsa.fixtures import Group
from tests_cpu.faults.later import later_group, synchronize
from tests_cpu.faults.planting import AT, planted


class Training:
    """Each step reduces gradients and a loss, and asks the device for the loss at its end."""

    def __init__(self, rank: int) -> None:
        self.rank, self.group = rank, later_group()
        self.gradients, self.loss = torch.ones(16), torch.ones(1)

    def step(self, *, skips: bool = False) -> None:
        if not skips:
            dist.all_reduce(self.gradients, group=self.group)  # HERE
        dist.all_reduce(self.loss, group=self.group)  # HERE
        synchronize()


@planted("skipped_collective", [1], n=3, marked=True, family="skip", origin="NCCL")
def test_gradients_are_not_reduced(group: Group) -> None:
    training = Training(group.rank)
    for step in range(6):
        training.step(skips=group.rank == 1 and step == AT)


@planted("skipped_collective", [2], n=3, marked=True, family="skip", origin="NCCL")
def test_uneven_data(group: Group) -> None:
    training = Training(group.rank)
    for _ in range(6 if group.rank != 2 else 4):
        training.step()
    dist.barrier()  # HERE


@planted(
    "extra_collective",
    [2],
    n=3,
    marked=True,
    family="extra",
    origin="NCCL",
)
def test_a_statistic_of_one_rank(group: Group) -> None:
    """The ranks are blocked in one line, in which each asks the device for its results."""
    training = Training(group.rank)
    for step in range(6):
        if step == AT and group.rank == 2:
            dist.broadcast(torch.ones(3), src=2, group=training.group)  # HERE
        training.step()


@planted("collective_mismatch", [0], n=3, marked=True, family="mismatch", origin="NCCL")
def test_another_size(group: Group) -> None:
    training = Training(group.rank)
    for step in range(6):
        if step == AT and group.rank == 0:
            training.gradients = torch.ones(12)
        training.step()


@planted("rank_died", [1], n=3, family="crash", origin="NCCL")
def test_a_rank_is_killed(group: Group) -> None:
    training = Training(group.rank)
    for step in range(6):
        if step == AT and group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        training.step()


@planted("sleeping", [0], n=3, marked=True, family="sleep", origin="NCCL")
def test_a_rank_sleeps(group: Group) -> None:
    training = Training(group.rank)
    for step in range(6):
        if step == AT and group.rank == 0:
            time.sleep(1000)  # HERE
        training.step()
