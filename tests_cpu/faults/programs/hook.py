"""Programs in which a hook has a collective."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from tests_cpu.faults.planting import AT, planted


@planted(3, rank=2)
def test_a_frozen_layer_whose_hook_does_not_run(group, culprit):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def told(gradient: torch.Tensor) -> None:
        dist.all_reduce(gradient.norm())  # HERE

    model[0].weight.register_hook(told)
    for step in range(4):
        model[0].weight.requires_grad_(not (group.rank == culprit and step == AT))
        model(torch.ones(2, 4)).sum().backward()
