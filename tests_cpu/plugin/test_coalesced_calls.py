"""Calls of several tensors at once: by torch's coalescing manager, and by its functional collectives."""

from __future__ import annotations

import pytest

from pytest_nsa.testing import run_example

HEALTHY = """
import torch.distributed._functional_collectives as functional

@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@world_size(2)
def test_functional_lists(group):
    tensors, world = [torch.ones(2), torch.ones(4)], dist.group.WORLD
    assert [t.sum().item() for t in functional.all_reduce_coalesced(tensors, "sum", world)] == [4, 8]
    for gather in ("all_gather_into_tensor_coalesced", "all_gather_single_coalesced"):
        if hasattr(functional, gather):  # torch 2.6 has the first alone
            assert [t.numel() for t in getattr(functional, gather)(tensors, world)] == [4, 8]
    scattered = functional.reduce_scatter_tensor_coalesced(tensors, "sum", [0, 0], world)
    assert [t.tolist() for t in scattered] == [[2], [2, 2]]
"""
FAULTS = """
import torch.distributed._functional_collectives as functional

@world_size(3)
@pytest.mark.timeout(30)
def test_by_the_manager(group):
    for step in range(4):
        if not (group.rank == 1 and step == 2):
            with dist._coalescing_manager():
                dist.all_gather_into_tensor(torch.empty(6), torch.ones(2))
                dist.all_gather_into_tensor(torch.empty(9), torch.ones(3))
        dist.barrier()

@world_size(3)
@pytest.mark.timeout(30)
def test_by_a_functional_list(group):
    for step in range(4):
        if not (group.rank == 1 and step == 2):
            [total + 0 for total in functional.all_reduce_coalesced([torch.ones(3), torch.ones(6)], "sum", dist.group.WORLD)]
        dist.barrier()
"""


def test_healthy_functional_lists_pass(pytester: pytest.Pytester) -> None:
    assert run_example(pytester, HEALTHY).outcomes == {"passed": 1}


def test_a_rank_that_skips_a_coalesced_call_is_named(pytester: pytest.Pytester) -> None:
    result = run_example(pytester, FAULTS)
    for name in ("test_by_the_manager", "test_by_a_functional_list"):
        verdict = result.verdicts[name]
        assert (verdict.outcome, verdict.cause, verdict.ranks) == ("HANG", "skipped_collective", (1,)), name
        assert "coalesced #5 (float32 x " in verdict.reason, name
