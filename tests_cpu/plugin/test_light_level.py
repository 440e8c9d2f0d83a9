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
