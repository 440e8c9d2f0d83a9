"""A library that runs the user's loop: the order of ranks shows in its lines, where the user's line is the same for all."""

from __future__ import annotations

import pytest

from pytest_nsa.testing import run_example

LIBRARY = """
import torch, torch.distributed as dist


class Trainer:
    def fit(self, stops):
        for epoch in range(4):
            for batch in range(3):
                self.step()
            if stops(epoch):
                break
        self.report()

    def step(self):
        dist.all_reduce(torch.ones(6))

    def report(self):
        dist.all_gather([torch.empty(2) for _ in range(dist.get_world_size())], torch.ones(2))


def total(values):
    if not values:
        return 0.0
    t = torch.tensor(float(sum(values)))
    dist.all_reduce(t)
    return float(t)


class Stage:
    def __init__(self, chunks):
        self.chunks, self.rank, self.last = chunks, dist.get_rank(), dist.get_world_size() - 1

    def run(self, *given):
        x = torch.ones(5)
        for i in range(self.chunks):
            if self.rank > 0:
                dist.recv(x, self.rank - 1)
            if self.rank < self.last:
                dist.send(x, self.rank + 1)
        for i in range(self.chunks):
            if self.rank < self.last:
                dist.recv(x, self.rank + 1)
            if self.rank > 0:
                dist.send(x, self.rank - 1)
"""
EXAMPLE = """
from loops.trainer import Stage, Trainer, total

@world_size(3)
@pytest.mark.timeout(60)
def test_stops_alone(group):
    Trainer().fit(lambda epoch: (group.rank, epoch) == (1, 1))

@world_size(3)
@pytest.mark.timeout(60)
def test_a_chunk_more(group):
    stage = Stage(5 if group.rank == 1 else 4)
    for step in range(2):
        if group.rank == 0:
            stage.run("input")
        elif group.rank == 2:
            stage.run("labels")
        else:
            stage.run()

@world_size(2)
@pytest.mark.timeout(60)
def test_asserts_what_it_skipped(group):
    assert total([1.0, 2.0] if group.rank else []) == 3

@world_size(2)
@pytest.mark.timeout(60)
def test_asserts_before_it_calls(group):
    assert group.rank == 0 and total([3.0]) == 3
"""


def test_a_rank_that_is_elsewhere_in_a_library_s_loops(pytester: pytest.Pytester) -> None:
    packages = pytester.mkdir("lib") / "python3.11" / "site-packages"  # as installed ones are found
    (packages / "loops").mkdir(parents=True)
    (packages / "loops" / "trainer.py").write_text(LIBRARY)
    result = run_example(pytester, f"import sys\nsys.path.insert(0, {str(packages)!r})\n{EXAMPLE}")
    found = {name: (v.cause, v.ranks) for name, v in result.verdicts.items()}
    assert found == {
        "test_stops_alone": ("skipped_collective", (1,)), "test_a_chunk_more": ("p2p_unmatched", (1,)),
        "test_asserts_what_it_skipped": ("rank_exception", (0,)),  # not certain: an assert may have made its calls
        "test_asserts_before_it_calls": ("rank_exception", (1,)),
    }  # fmt: skip
