"""Two tests on two ranks: one passes, one hangs, and the plugin says why."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from small_transformer import SmallTransformer, count_long_documents, train_step

from pytest_nsa import scenario, trace_kinds, world_size


@scenario("one_step")
@world_size(2)
@trace_kinds("grads")
def test_every_gradient_arrives(ddp, trace):
    torch.manual_seed(0)
    model = ddp.wrap(SmallTransformer())
    with trace(model):
        loss = train_step(model, torch.randint(0, 64, (2, 17)))
    assert trace.missing_gradients() == []
    assert loss > 0


@world_size(2)
@pytest.mark.timeout(20)
def test_counts_documents(group):
    lengths = torch.tensor([10, 2000]) if group.rank == 0 else torch.tensor([10, 20])
    total = count_long_documents(lengths, 1000)
    dist.barrier()
    assert total == 1
