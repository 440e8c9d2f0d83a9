"""Ranks that fail at one line for different reasons: the report says of each what is true of it."""

from __future__ import annotations

import pytest

from pytest_nsa.testing import run_example

SOURCE = """
class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.a(x) if x.sum() > 0 else self.b(x)


@world_size(2)
def test_branches(ddp):
    model = ddp.wrap(Branches())
    for _ in range(2):
        model(torch.ones(2, 4) * (-1) ** ddp.rank).sum().backward()


@world_size(2)
def test_group_of_exceptions(group):
    raise ExceptionGroup("files", [ValueError("bad header") if group.rank else OSError("disk full")])


@world_size(2)
def test_values(group):
    assert group.rank == 2


@world_size(2)
def test_alike(group):
    assert group.world_size == 3


@world_size(2)
def test_a_nan_that_is_meant(ddp):
    model = ddp.wrap(torch.nn.Linear(4, 1))
    loss = model(torch.full((2, 4), float("nan"))).sum()
    loss.backward()
    assert torch.isnan(loss)
    assert ddp.rank == 0


@world_size(2)
def test_skipped_on_one(group):
    if group.rank == 1:
        pytest.skip("no data")


@world_size(2)
def test_raises_in_a_traced_backward(ddp, trace):
    model = ddp.wrap(torch.nn.Linear(4, 1))
    with trace(model):
        out = model(torch.ones(2, 4))
        out.register_hook(lambda gradient: gradient.no_such_attribute)
        out.sum().backward()


@world_size(2)
def test_asserts_in_the_trace(ddp, trace):
    model = ddp.wrap(Branches(), find_unused_parameters=True)
    with trace(model):
        model(torch.ones(2, 4)).sum().backward()
        assert not trace.missing_gradients()


@world_size(2)
def test_says_the_others(group):
    if group.rank == 1:
        raise ValueError("not while the others train; see data/the others/x.bin")
    dist.barrier()
"""
LOCK = """
@world_size(2)
@pytest.mark.timeout(5)
def test_lock(group, tmp_path):
    import fcntl

    file = open(tmp_path / "lock", "w")
    fcntl.flock(file, fcntl.LOCK_EX)
    dist.barrier()
    fcntl.flock(file, fcntl.LOCK_UN)
"""


def test_what_differs_between_ranks_is_in_the_report(pytester: pytest.Pytester) -> None:
    result = run_example(pytester, SOURCE)
    verdicts = result.verdicts
    reason = verdicts["test_branches"].reason
    assert "on rank 0 parameters took no part in the last backward: b.weight, b.bias" in reason
    assert "on rank 1 parameters took no part in the last backward: a.weight, a.bias" in reason
    assert "OSError: disk full" in result.stdout
    assert "ValueError: bad header" in result.stdout
    for name in ("test_group_of_exceptions", "test_values"):
        assert "different errors or values" in verdicts[name].advice
    assert "no rank differs" in verdicts["test_alike"].advice
    meant = verdicts["test_a_nan_that_is_meant"]
    assert (meant.cause, meant.ranks) == ("assertion", (1,))
    raises = verdicts["test_raises_in_a_traced_backward"]
    assert raises.cause == "assertion", "the gradients that are missing are a consequence"
    assert "AttributeError" in raises.reason
    assert verdicts["test_asserts_in_the_trace"].cause == "unused_parameters", "the backward has completed"
    assert "not while the others train; see data/the others/x.bin" in verdicts["test_says_the_others"].reason
    skipped = verdicts["test_skipped_on_one"]
    assert "in test_skipped_on_one" in skipped.where
    assert "what all ranks know" in skipped.advice


@pytest.mark.slow
def test_who_holds_a_file_s_lock_waits_in_something_else(pytester: pytest.Pytester) -> None:
    verdict = run_example(pytester, LOCK).verdicts["test_lock"]
    assert verdict.cause == "lock_deadlock"
    (holder,) = {rank for rank in (0, 1) if f"which rank {rank} holds" in verdict.reason}
    assert f"rank {1 - holder} waits for a lock on " in verdict.reason
    assert f"rank {holder} waits in barrier #1 at " in verdict.reason
