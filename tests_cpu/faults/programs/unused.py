"""Programs in which a parameter gets no gradient."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from pytest_nsa import fixtures
from pytest_nsa import trace as traced
from pytest_nsa.fixtures import Trace
from tests_cpu.faults.planting import TwoHeads, batch, planted, train

MISSING = "other.weight, other.bias"


@traced("grads")
@planted(2, rank=1)
def test_missing_on_one_rank_and_ddp_waits(ddp: fixtures.DDP, trace: Trace, culprit: int) -> None:
    model = ddp.wrap(TwoHeads(both=ddp.rank != culprit))
    with trace(model):  # HERE
        model(batch(ddp.rank, 0)).sum().backward()
    dist.all_reduce(torch.ones(2))


@traced("grads")
@planted(2)
def test_missing_everywhere_and_the_test_asserts_it(ddp: fixtures.DDP, trace: Trace, faulty: bool) -> None:
    model = ddp.wrap(TwoHeads(both=not faulty), find_unused_parameters=True)
    with trace(model):
        model(batch(ddp.rank, 0)).sum().backward()
    assert trace.missing_gradients() == []  # HERE


@planted(2)
def test_a_parameter_is_never_used(ddp: fixtures.DDP, faulty: bool) -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(8, 1), nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x) + (0 if faulty else self.unused(x))

    train(ddp.wrap(Head()), ddp.rank)
