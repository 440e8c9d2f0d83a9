"""Calls past the methods of a group: by functional collectives, their backward, and torch's coalescing manager."""

from __future__ import annotations

import pytest
import torch.distributed._functional_collectives as functional

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

@world_size(2)
def test_uneven_shares(group):
    gives, takes = ([1, 3], [1, 2]) if group.rank == 0 else ([2, 5], [3, 5])
    x = torch.ones(sum(gives), 2, requires_grad=True)
    functional.all_to_all_single_autograd(x, takes, gives, dist.group.WORLD).sum().backward()
    assert x.grad.eq(1).all()

def step(x):
    total = functional.all_reduce(x * 2, "sum", dist.group.WORLD)
    return functional.wait_tensor(torch.ops._c10d_functional.all_reduce(total, "sum", dist.group.WORLD.group_name))

@world_size(2)
def test_compiled(group):
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        assert compiled(torch.ones(2)).tolist() == step(torch.ones(2)).tolist() == [8, 8]

@world_size(2)
def test_on_tensors_without_data(group):
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    with FakeTensorMode():
        step(torch.ones(2))
    assert "all_reduce" in make_fx(step, tracing_mode="fake")(torch.ones(2)).code
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

@world_size(3)
@pytest.mark.timeout(30)
def test_by_an_overload(group):
    if group.rank == 0:  # a trace runs nothing
        torch.fx.symbolic_trace(lambda x: torch.ops._c10d_functional.all_reduce.default(x, "sum", "0"))
    for step in range(4):
        if not (group.rank == 1 and step == 2):
            torch.ops._c10d_functional.all_reduce.default(torch.ones(5), "sum", dist.group.WORLD.group_name)
        dist.barrier()

def average(x):
    return functional.all_reduce(x * 2, "sum", dist.group.WORLD) if x.sum() > 0 else x

@world_size(3)
@pytest.mark.timeout(30)
def test_in_a_compiled_graph(group):
    compiled = torch.compile(average, backend="aot_eager")
    for step in range(4):
        compiled(torch.ones(7) * (-1 if group.rank == 1 and step == 2 else 1)) + 1
        dist.barrier()

@world_size(3)
@pytest.mark.timeout(30)
def test_in_a_backward(group):
    layer = torch.nn.Linear(2, 2)
    for step in range(4):
        loss = functional.all_gather_tensor_autograd(layer(torch.ones(3, 2)), 0, dist.group.WORLD).sum()
        if not (group.rank == 1 and step == 2):
            loss.backward()
        dist.barrier()
"""


def test_healthy_calls_pass(pytester: pytest.Pytester) -> None:
    assert run_example(pytester, HEALTHY).outcomes["passed"] == 4


def test_a_rank_that_skips_a_call_is_named(pytester: pytest.Pytester) -> None:
    result = run_example(pytester, FAULTS)
    skipped = {
        "test_by_the_manager": "coalesced #5 (float32 x 15)",
        "test_by_a_functional_list": "all_reduce_coalesced #5 (float32 x 9)",
        "test_by_an_overload": "all_reduce #5 (float32 x 5)",
        "test_in_a_compiled_graph": "all_reduce #5 (float32 x 7)",
    }
    if hasattr(functional, "reduce_scatter_tensor_backward"):  # older versions of torch have it in C++
        skipped["test_in_a_backward"] = "reduce_scatter_tensor #8 (float32 x 18)"
    for name, call in skipped.items():
        verdict = result.verdicts[name]
        assert (verdict.outcome, verdict.cause, verdict.ranks) == ("HANG", "skipped_collective", (1,)), name
        assert verdict.reason.startswith("rank 1 went on without "), name
        assert call in verdict.reason, name
