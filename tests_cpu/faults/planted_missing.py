"""Planted: parameters without a gradient in a backward that ends, as a requested trace finds."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from pytest_nsa import trace as traced
from pytest_nsa.fixtures import DDP, Group, Trace
from tests_cpu.faults.planting import batch, planted


class TwoHeads(nn.Module):
    """Two linear layers, of which the second is used where ``both`` is true."""

    def __init__(self, both: bool) -> None:
        super().__init__()
        self.used, self.other, self.both = nn.Linear(8, 1), nn.Linear(8, 1), both

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [B, 1] for x [B, 8]."""
        return self.used(x) + (self.other(x) if self.both else 0)


MISSING = "other.weight, other.bias"


@traced("grads")
@planted(
    "unused_parameters",
    [1],
    marked=True,
    reason=f"step 1 no gradient had arrived on rank 1 for {MISSING}; on the other",
)
def test_missing_on_one_rank_and_ddp_waits(ddp: DDP, trace: Trace) -> None:
    model = ddp.wrap(TwoHeads(both=ddp.rank == 0))
    with trace(model):  # HERE
        model(batch(ddp.rank, 0)).sum().backward()
    dist.all_reduce(torch.ones(2))


@traced("grads")
@planted("unused_parameters", [0, 1], marked=True, reason=f"on ranks 0 and 1 for {MISSING}")
def test_missing_everywhere_and_the_test_asserts_it(ddp: DDP, trace: Trace) -> None:
    model = ddp.wrap(TwoHeads(both=False), find_unused_parameters=True)
    with trace(model):
        model(batch(ddp.rank, 0)).sum().backward()
    assert trace.missing_gradients() == []  # HERE


@traced("grads")
@planted(
    "unused_parameters",
    [1],
    n=3,
    marked=True,
    reason="on rank 1 for other.weight, other.bias; on the others all arrived",
)
def test_missing_on_one_of_three_ranks_without_ddp(group: Group, trace: Trace) -> None:
    model = TwoHeads(both=group.rank != 1)
    with trace(model):
        model(batch(group.rank, 0)).sum().backward()
    assert trace.missing_gradients() == []  # HERE


@traced("grads")
@planted("unused_parameters", [1], marked=True, reason=f"on rank 1 for {MISSING}; on the other rank all arrived")
def test_missing_on_one_rank_of_replicas_that_reduce_by_hand(group: Group, trace: Trace) -> None:
    model = TwoHeads(both=group.rank == 0)
    with trace(model):  # HERE
        model(batch(group.rank, 0)).sum().backward()
    flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    dist.all_reduce(flat)  # of 18 numbers and of 9


@traced("grads")
@planted("assertion", [0, 1], marked=True, reason="the loss")
def test_unused_on_purpose_and_another_assertion(ddp: DDP, trace: Trace) -> None:
    model = ddp.wrap(TwoHeads(both=False), find_unused_parameters=True)
    with trace(model):
        loss = model(batch(ddp.rank, 0)).sum()
        loss.backward()
    assert loss.abs().item() > 1e6, "the loss"  # HERE
