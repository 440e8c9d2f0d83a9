"""Programs in which a loop does not end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pytest_nsa.fixtures import Group
from tests_cpu.faults.planting import AT, planted


@planted(3, rank=2)
def test_draws_until_one_is_allowed(group, culprit):
    weights = torch.tensor([0.0, 0.5, 0.5])
    for step in range(6):
        forbidden = (1, 2) if (group.rank, step) == (culprit, AT) else (0,)
        while True:
            token = int(torch.multinomial(weights, 1))  # HERE
            if token not in forbidden:  # HERE
                break
        dist.all_reduce(torch.tensor([token]))


def spin() -> None:
    """For ever."""
    number = 0
    while True:
        number = (number + 1) % 1000


def at(group: Group, culprit: int, fault: Callable[[], Any]) -> None:
    """Six rounds of an all_reduce; in round AT, rank ``culprit`` calls ``fault()``."""
    for step in range(6):
        if group.rank == culprit and step == AT:
            fault()
        dist.all_reduce(torch.ones(2))


@planted(4, rank=3)
def test_a_loop_of_four(group: Group, culprit: int) -> None:
    at(group, culprit, spin)


@planted(2, rank=0)
def test_a_file_is_asked_for_without_a_pause(group: Group, tmp_path: Path, culprit: int) -> None:
    def fault() -> None:
        while not (tmp_path / "ready").exists():
            pass

    at(group, culprit, fault)


def split_place(batch, size):
    first = 0
    while first < len(batch):  # HERE
        yield batch[first : first + size]
        first += size


@planted(4, rank=3)
def test_a_for_over_parts_of_size_zero(group, culprit):
    """It calls a module in each round, and so makes progress for ever."""
    model = nn.Embedding(50, 8)
    for length in (16, 96 if group.rank == culprit else 24):
        total = torch.zeros(1)
        for part in split_place(torch.zeros(4, length, dtype=torch.long), 64 // length):  # HERE
            total += model(part).sum().detach()  # HERE
        dist.all_reduce(total)


def ways(stairs):
    """In how many ways one climbs so many stairs, one or two at a time."""
    if stairs < 2:
        return 1
    after_one = ways(stairs - 1)
    after_two = ways(stairs - 2)
    return after_one + after_two


@planted(2, rank=1)
def test_a_recursion_that_forgets_what_it_counted(group, culprit):
    for step in range(5):
        total = ways(90 if (group.rank, step) == (culprit, AT) else 10)  # HERE
        dist.all_reduce(torch.tensor(float(total)))
