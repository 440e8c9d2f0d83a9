"""Replicas that nothing reduces: observed at each optimizer's step, whoever reduces."""

from __future__ import annotations

import pytest

from pytest_nsa.testing import run_example

SOURCE = """
from torch import nn
from pytest_nsa import check_divergence

def train(group, seed, reduce):
    torch.manual_seed(seed)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        torch.manual_seed(10 * group.rank + step)
        model(torch.randn(2, 4)).square().mean().backward()
        reduce(model)
        optimizer.step()
        optimizer.zero_grad()

def pairs():
    return [dist.new_group([0, 1]), dist.new_group([2, 3])]

@check_divergence
@world_size(4)
def test_a_stage_that_reduces_by_hand_forgets_it(group):
    own = pairs()[group.rank // 2]
    def reduce(model):
        if group.rank < 2:
            for p in model.parameters():
                dist.all_reduce(p.grad, group=own)  # HERE
    train(group, group.rank // 2, reduce)

@check_divergence
@world_size(4)
def test_ddp_over_one_rank(group):
    first, _ = pairs()
    torch.manual_seed(0)
    own = [dist.new_group([rank]) for rank in range(4)][group.rank]
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4), process_group=first if group.rank < 2 else own)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        torch.manual_seed(10 * group.rank + step)
        model(torch.randn(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

@check_divergence
@world_size(4)
def test_models_that_begin_differently(group):
    own = pairs()[group.rank // 2]
    def reduce(model):
        if group.rank < 2:
            for p in model.parameters():
                dist.all_reduce(p.grad, group=own)
    train(group, [0, 0, 2, 3][group.rank], reduce)

@check_divergence
@world_size(4)
@pytest.mark.parametrize("asserts", [False, True])
def test_two_ways_to_train_one_model(group, asserts):
    own = pairs()[group.rank // 2]
    def reduce(model):
        if group.rank < 2:
            for p in model.parameters():
                dist.all_reduce(p.grad, group=own)
    train(group, 0, reduce)
    assert not asserts or group.rank < 2

@check_divergence
@world_size(4)
def test_no_rank_reduces(group):
    train(group, 0, lambda model: None)

@check_divergence
@world_size(4)
def test_equal_data_needs_no_reduction(group):
    def reduce(model):
        torch.manual_seed(7)
        model.zero_grad()
        model(torch.randn(2, 4)).square().mean().backward()
    train(group, 0, reduce)
"""


def test_replicas_that_one_stage_does_not_reduce(pytester: pytest.Pytester) -> None:
    result = run_example(pytester, SOURCE)
    assert result.outcomes == {"failed": 3, "passed": 4}
    asserted = result.verdicts["test_two_ways_to_train_one_model[True]"]
    assert (asserted.cause, asserted.ranks, asserted.certain) == ("silent_divergence", (2, 3), False)
    by_hand = result.verdicts["test_a_stage_that_reduces_by_hand_forgets_it"]
    lines = (pytester.path / "test_example.py").read_text().splitlines()
    line = next(n for n, text in enumerate(lines, 1) if text.endswith("# HERE"))
    assert (by_hand.cause, by_hand.ranks, by_hand.rule) == (
        "silent_divergence",
        (2, 3),
        "unreduced.unreduced_replicas",
    )
    assert by_hand.where == f"test_example.py:{line} in reduce"
    ddp = result.verdicts["test_ddp_over_one_rank"]
    assert (ddp.cause, ddp.ranks, ddp.rule) == ("silent_divergence", (2, 3), "unreduced.unreduced_replicas")
