"""Ranks over real NCCL: what one GPU can show, and what needs two. `benchmarks/nccl.sh` keeps the outcome."""

import pytest
import torch
import torch.distributed as dist

from pytest_nsa import fails_as, gpu, world_size
from pytest_nsa.fixtures import DDP, Group


@gpu(count=1)
@world_size(1)
@pytest.mark.timeout(60)
def test_one_rank_reduces(group: Group) -> None:
    assert group.backend == "nccl"
    x = torch.full((1000,), 3.0, device=group.device)
    dist.all_reduce(x)
    assert x.eq(3).all()


@gpu(count=2)
@world_size(2)
@pytest.mark.timeout(60)
def test_two_ranks_reduce(group: Group) -> None:
    assert group.backend == "nccl"
    x = torch.full((1000,), float(group.rank + 1), device=group.device)
    dist.all_reduce(x)
    assert x.eq(3).all()


@gpu(count=2)
@world_size(2)
@pytest.mark.timeout(60)
def test_ddp_averages_gradients(ddp: DDP, group: Group) -> None:
    model = ddp.wrap(torch.nn.Linear(4, 1, bias=False).to(group.device))
    model(torch.full((1, 4), float(group.rank), device=group.device)).sum().backward()
    assert next(model.parameters()).grad.eq(0.5).all()  # type: ignore[union-attr]


@fails_as("skipped_collective")
@gpu(count=2)
@world_size(2)
@pytest.mark.timeout(60)
def test_a_skipped_collective_is_named(group: Group) -> None:
    x = torch.ones(8, device=group.device)
    for step in range(3):
        dist.all_reduce(x)
        if not (step == 1 and group.rank == 1):
            dist.broadcast(x, src=0)
        x.sum().item()
