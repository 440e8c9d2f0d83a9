"""Models that ranks give DDP in another order, or with other shapes, dtypes or frozen parameters."""

from __future__ import annotations

import json

import pytest

from pytest_nsa.testing import run_example

MODELS = """
from torch import nn
from pytest_nsa import check_divergence

class Net(nn.Module):
    def __init__(self, *names):
        super().__init__()
        torch.manual_seed(0)
        layers = {name: nn.Linear(8, 8, bias=False) for name in sorted(names)}
        for name in names:
            self.add_module(name, layers[name])
        self.names = sorted(names)

    def forward(self, x):
        for name in self.names:
            x = torch.relu(getattr(self, name)(x))
        return x

def train(ddp, model):
    wrapped = ddp.wrap(model)  # WRAP
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        wrapped(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()
    return model
"""


def test_parameters_that_ddp_pairs_wrongly_fail_a_test_that_passes(pytester: pytest.Pytester) -> None:
    source = (
        MODELS
        + """
@check_divergence
@world_size(3)
def test_another_order(ddp, group):
    train(ddp, Net("b", "a") if group.rank == 1 else Net("a", "b"))

@check_divergence
@world_size(2)
def test_frozen_by_one(ddp, group):
    model = Net("a", "b")
    model.get_submodule("ab"[group.rank]).requires_grad_(False)
    train(ddp, model)

@check_divergence
@world_size(2)
def test_the_same_order_by_other_names(ddp, group):
    train(ddp, Net("a", f"own_{group.rank}"))
"""
    )
    result = run_example(pytester, source)
    order, frozen = (result.verdicts[name] for name in ("test_another_order", "test_frozen_by_one"))
    assert (order.outcome, order.cause, order.ranks) == ("FAIL", "silent_divergence", (1,))
    assert (order.module, order.rule) == ("a", "wrapped.ordered_otherwise")
    assert (frozen.outcome, frozen.cause, frozen.ranks) == ("FAIL", "silent_divergence", (0, 1))
    assert result.outcomes == {"failed": 2, "passed": 1}


def test_parameters_that_differ_name_the_failure_of_a_test(pytester: pytest.Pytester) -> None:
    source = (
        MODELS
        + """
@world_size(2)
def test_another_order(ddp, group):
    model = train(ddp, Net("b", "a") if group.rank == 1 else Net("a", "b"))
    values = [torch.empty(8, 8) for _ in range(2)]
    dist.all_gather(values, model.a.weight.detach())
    assert torch.equal(*values)

@world_size(2)
def test_another_dtype(ddp, group):
    model = Net("a", "b")
    train(ddp, model.bfloat16() if group.rank == 1 else model)

@world_size(3)
def test_another_shape(ddp, group):
    model = Net("a", "b")
    if group.rank == 2:
        model.b = nn.Linear(8, 4, bias=False)
    train(ddp, model)

@world_size(2)
def test_fewer(ddp, group):
    model = Net("a", "b")
    model.b.requires_grad_(group.rank == 0)
    train(ddp, model)

@world_size(2)
def test_a_refusal_that_is_expected(ddp, group):
    model = Net("a", "b")
    model.b = nn.Linear(8, 4 + group.rank, bias=False)
    with pytest.raises(RuntimeError):
        train(ddp, model)
    if group.rank == 1:
        raise KeyError("another one")
"""
    )
    result = run_example(pytester, source)
    causes = {name: (v.cause, v.ranks, v.rule) for name, v in result.verdicts.items()}
    assert causes == {
        "test_another_order": ("silent_divergence", (0, 1), "wrapped.ordered_otherwise_before"),
        "test_another_dtype": ("collective_mismatch", (0, 1), "wrapped.incompatible"),
        "test_another_shape": ("collective_mismatch", (2,), "wrapped.incompatible"),
        "test_fewer": ("collective_mismatch", (0, 1), "wrapped.incompatible"),
        "test_a_refusal_that_is_expected": ("rank_exception", (1,), "exits.rank_raised"),
    }
    line = 1 + (pytester.path / "test_example.py").read_text().splitlines().index(
        "    wrapped = ddp.wrap(model)  # WRAP"
    )
    assert result.verdicts["test_another_shape"].where == f"test_example.py:{line} in train"


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
