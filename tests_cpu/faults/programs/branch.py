"""Programs in which the forward takes another branch."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pytest_nsa import fixtures
from pytest_nsa.fixtures import Group
from tests_cpu.faults.planting import AT, batch, loss_of, planted


@planted(2, rank=1)
def test_ranks_take_different_paths(ddp: fixtures.DDP, culprit: int) -> None:
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
        if step == AT and ddp.rank == culprit:
            nn.init.constant_(first.bias, 100.0)
        loss_of(model, batch(ddp.rank, step)).backward()


@planted(3, rank=1)
def test_expected_to_fail_on_one_rank(group: Group, culprit: int) -> None:
    dist.all_reduce(torch.ones(1))
    if group.rank == culprit:
        pytest.xfail("this host has an old fabric")
    dist.all_reduce(torch.ones(1))
