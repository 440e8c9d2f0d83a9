"""Programs in which the process ends."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from pytest_nsa.fixtures import Group
from tests_cpu.faults.planting import AT, planted


def at(group: Group, culprit: int, fault: object) -> None:
    """Six rounds of an all_reduce; in round AT, rank ``culprit`` calls ``fault()``."""
    for step in range(6):
        if group.rank == culprit and step == AT:
            fault()  # type: ignore[operator]
        dist.all_reduce(torch.ones(2))


@planted(2, rank=1)
def test_exits_with(group: Group, culprit: int, code: int = 0) -> None:
    at(group, culprit, lambda: os._exit(code))


@planted(4, rank=3)
def test_sys_exit(group: Group, culprit: int) -> None:
    at(group, culprit, lambda: sys.exit(0))
