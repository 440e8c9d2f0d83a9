"""NSA_TRACE_LEVEL=light: evidence of collectives and a heartbeat alone, which is enough to name the rank that skipped one."""

from __future__ import annotations

import json

import pytest

from pytest_nsa.testing import run_example


def test_a_skipped_collective_is_named_without_modules_and_gradients(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NSA_TRACE_LEVEL", "light")
    source = """
    @world_size(2)
    def test_skips(group):
        torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
        if group.rank == 1:
            return
        dist.barrier()

    @check_divergence
    @world_size(2)
    def test_needs_more(ddp): pass
    """
    result = run_example(pytester, source)
    verdict = result.verdicts["test_skips"]
    assert (verdict.cause, verdict.ranks) == ("skipped_collective", (1,))
    beats = (result.folder("test_skips") / "heartbeat_rank0.jsonl").read_text().splitlines()
    assert {json.loads(line)["modules_entered"] for line in beats} == {0}
    assert "check_divergence needs what NSA_TRACE_LEVEL=light does not record: unset it" in result.stdout
    assert result.outcomes == {"failed": 1, "errors": 1}
    monkeypatch.setenv("NSA_TRACE_LEVEL", "none")
    wrong = run_example(pytester, "@world_size(2)\ndef test_a(): pass")
    assert "NSA_TRACE_LEVEL='none': must be full or light" in wrong.stdout


DDP = """
from contextlib import nullcontext

def train(group, batches, last):
    torch.manual_seed(group.rank)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2), gradient_as_bucket_view=True)
    for step in range(6):
        with model.no_sync() if step == 3 and batches(group.rank) else nullcontext():
            model(torch.ones(2, 4)).sum().backward()
        if step == 3 and last(group.rank):
            dist.all_reduce(torch.ones(1))
    dist.barrier()
    return model.module.weight.grad

@world_size(3)
def test_accumulates_alone(group):
    train(group, lambda rank: rank == 2, lambda rank: False)

@world_size(3)
def test_reports_alone(group):
    train(group, lambda rank: False, lambda rank: rank == 0)

@world_size(3)
def test_healthy(group):
    total = torch.full((2, 4), 2.0)
    expected = torch.zeros(2, 4)
    for _ in range(6):  # a gradient that lives in its bucket is divided, as DDP does without a hook
        expected = sum((expected + total).div(3) for _ in range(3))
    assert torch.equal(train(group, lambda rank: False, lambda rank: False), expected)
"""


def test_the_reductions_of_ddp_are_recorded(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank in a backward waits in its reduction: it is not the rank that has not come to the others' call."""
    monkeypatch.setenv("NSA_TRACE_LEVEL", "light")
    result = run_example(pytester, DDP)
    found = {name: (v.outcome, v.cause, v.ranks) for name, v in result.verdicts.items()}
    assert found["test_accumulates_alone"][1:] == ("skipped_collective", (2,))
    assert found["test_reports_alone"][1:] == ("extra_collective", (0,))
    assert found["test_healthy"][0] == "PASS"
