"""Models that ranks give DDP in another order, or with other shapes, dtypes or frozen parameters."""

from __future__ import annotations

import json

import pytest

from pytest_nsa.testing import run_example


def test_parameters_that_ddp_was_asked_to_ignore_are_not_added_later(pytester: pytest.Pytester) -> None:
    source = """
from torch import nn
from pytest_nsa import check_divergence

@check_divergence
@world_size(2)
@pytest.mark.parametrize("is_ignored", [True, False])
def test_it(ddp, group, is_ignored):
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
    if is_ignored:
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["1.0.weight", "1.0.bias"])
    wrapped = ddp.wrap(model)
    if not is_ignored:
        model[1].add_module("1", nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""
    result = run_example(pytester, source, "--ranks-keep=all")
    added = {}
    for name in ("test_it[True]", "test_it[False]"):
        lines = (result.folder(name) / "rank0" / "checksums.jsonl").read_text().splitlines()
        added[name] = [made[0] for line in map(json.loads, lines) for made in line.get("added", ())]
    assert added == {"test_it[True]": [], "test_it[False]": ["1.1.weight", "1.1.bias"]}
