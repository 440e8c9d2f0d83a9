"""Programs in which a step takes longer."""

from __future__ import annotations

import time
from collections import OrderedDict

import torch
import torch.distributed as dist
from torch import nn

from pytest_nsa import fixtures
from tests_cpu.faults.planting import AT, net, planted, train


@planted(2, rank=0)
def test_one_rank_needs_seconds_for_a_step(ddp: fixtures.DDP, culprit: int) -> None:
    model = ddp.wrap(net())
    for _ in range(40):
        time.sleep(1.2 if ddp.rank == culprit else 0)
        model(torch.ones(2, 8)).sum().backward()


@planted(2)
def test_all_ranks_are_slow(ddp: fixtures.DDP, faulty: bool) -> None:
    model = ddp.wrap(net())
    for block in model.module.blocks:
        block.fault = lambda: time.sleep(0.2 if faulty else 0)
    train(model, ddp.rank, steps=40)


class Scan(nn.Module):
    """Position by position: three autograd nodes each, and the backward of each selection makes zeros of x's whole size."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, S, dim] -> the same."""
        return torch.stack([x[:, t] * self.weight for t in range(x.shape[1])], dim=1)


@planted(2)
def test_a_module_with_sixty_thousand_autograd_nodes(ddp: fixtures.DDP, faulty: bool) -> None:
    layers = OrderedDict(out=nn.Linear(64, 64), scan=Scan(64))
    ddp.wrap(nn.Sequential(layers))(torch.ones(1, 20_000 if faulty else 20, 64)).sum().backward()


@planted(3, rank=2)
def test_one_rank_validates_on_all_of_its_data(group, culprit):
    model = nn.Linear(8, 8)
    for step in range(4):
        if (group.rank, step) == (culprit, AT):
            for _ in range(100_000):
                time.sleep(0.01)  # HERE
                model(torch.ones(1, 8))  # HERE
        dist.all_reduce(torch.ones(1))
