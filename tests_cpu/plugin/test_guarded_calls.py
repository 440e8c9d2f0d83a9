"""A call that one rank makes more, or less, ahead of calls like it: the ranks wait much later, and the report names its line."""

from __future__ import annotations

import pytest

from pytest_nsa.testing import HEADER, run_example

SOURCE = """
def reduce():
    dist.all_reduce(torch.ones(2))


@world_size(4)
def test_more_at_first(group):
    if group.rank == 0:
        dist.all_reduce(torch.ones(2))  # MORE AT FIRST
    for _ in range(4):
        dist.all_reduce(torch.ones(2))


@world_size(4)
def test_more_in_the_middle(group):
    for i in range(4):
        reduce()
        if group.rank == 2 and i == 1:
            reduce()  # MORE IN THE MIDDLE
    dist.barrier()


@world_size(4)
def test_more_in_each_round(group):
    for _ in range(3):
        dist.all_reduce(torch.ones(2))
        if group.rank == 0:
            dist.all_reduce(torch.ones(2))  # MORE IN EACH ROUND
        dist.all_reduce(torch.ones(2))


@world_size(4)
def test_less_at_first(group):
    if group.rank != 3:
        dist.all_reduce(torch.ones(2))  # LESS AT FIRST
    for _ in range(4):
        dist.all_reduce(torch.ones(2))
"""


def test_the_line_is_that_of_the_call_that_one_side_alone_makes(pytester: pytest.Pytester) -> None:
    verdicts = run_example(pytester, SOURCE).verdicts
    lines = (HEADER + SOURCE).splitlines()
    found = {name: lines[int((v.called_from or v.where).split(":")[1].split()[0]) - 1] for name, v in verdicts.items()}
    assert [(verdicts[name].cause, verdicts[name].ranks) for name in sorted(found)] == [
        ("skipped_collective", (3,)), ("extra_collective", (0,)), ("extra_collective", (0,)), ("extra_collective", (2,)),
    ]  # fmt: skip
    for name, line in found.items():
        assert name.removeprefix("test_").replace("_", " ").upper() in line, (name, verdicts[name].where)
