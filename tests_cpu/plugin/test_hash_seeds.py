"""Ranks with hash seeds of their own: a bug by the order of a set, which forked ranks all have in one order."""

from __future__ import annotations

import pytest

from pytest_nsa.testing import run_example

# Each rank reduces its metrics in the order of a set of their names: with other seeds they meet in other orders.
METRICS = """
NAMES = {"loss": 1, "tokens": 2, "norm": 3, "accuracy": 4, "entropy": 5, "clipped": 6}

def reduce_all():
    for name in set(NAMES):
        dist.all_reduce(torch.ones(NAMES[name]))
"""


@pytest.mark.slow
def test_a_bug_by_the_order_of_a_set_is_found_and_can_be_repeated(pytester: pytest.Pytester) -> None:
    source = f"""{METRICS}
@world_size(2)
def test_forked(group):
    reduce_all()

@hash_seeds(1, 2)
@world_size(2)
@pytest.mark.timeout(60)
def test_given(group):
    assert os.environ["PYTHONHASHSEED"] == str(group.rank + 1)
    reduce_all()

@hash_seeds
@world_size(2)
def test_drawn(group):
    seeds = [None, None]
    dist.all_gather_object(seeds, os.environ["PYTHONHASHSEED"])
    assert seeds[0] != seeds[1]

@world_size(2)
def test_after_it_ranks_are_forked(group):
    assert os.getppid() != int(os.environ["HOST"])  # the zygote's
"""
    pytester.makeconftest("import os\nos.environ.setdefault('HOST', str(os.getpid()))\n")
    result = run_example(pytester, source)
    assert result.outcomes == {"passed": 3, "failed": 1}, result.stdout
    verdict = result.verdicts["test_given"]
    assert verdict.outcome == "HANG"
    # The second calls differ in size, and one earlier call shows no order: a skipped call explains them as well.
    assert verdict.cause in ("collective_mismatch", "skipped_collective")
    assert not verdict.certain
    assert "in reduce_all" in verdict.where
    assert "hash seeds: @hash_seeds(1, 2) starts the ranks with these again" in result.stdout
