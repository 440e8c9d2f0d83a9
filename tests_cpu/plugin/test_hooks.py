"""Hooks that a repository may implement, and how reports show their results."""

from __future__ import annotations

import json

import pytest

from pytest_nsa.testing import run_example

SOURCE = """
@scenario("warm_up", reads_as="the link <between> nodes")
@world_size(2)
def test_fails(group):
    assert group.rank == 0

@world_size(2)
def test_passes(group):
    pass
"""


def test_a_repository_decides_over_a_run(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        """
from pytest_nsa.diagnosis.decision import Decision

def pytest_nsa_decide(verdicts):
    failed = [name for name, verdict in verdicts.items() if verdict.failed]
    return Decision(sentence=f"Our plan: {failed}.", action="call the network team", path=("is it the link? yes",))
"""
    )
    result = run_example(pytester, SOURCE)
    assert "Our plan: ['warm_up']." in result.stdout
    assert result.run is not None
    summary = (result.run / "SUMMARY.md").read_text()
    assert summary.startswith("Our plan: ['warm_up'].")
    assert "**Call the network team.**" in summary
    assert "1. is it the link? yes" in summary
    assert "- the plan reads it as: the link \\<between> nodes" in summary
    page = (result.run / "report.html").read_text()
    assert "The plan reads it as: the link &lt;between&gt; nodes" in page
    decision = json.loads((result.run / "decision.json").read_text())
    assert decision == {
        "schema": 1, "sentence": "Our plan: ['warm_up'].", "action": "call the network team", "path": ["is it the link? yes"],
    }  # fmt: skip


def test_without_one_the_surest_verdict_is_read_first(pytester: pytest.Pytester) -> None:
    result = run_example(pytester, SOURCE)
    assert "warm_up ends in FAIL (assertion) on rank 1" in result.stdout
    assert "do the verdicts name one cause? yes: assertion" in (result.run / "SUMMARY.md").read_text()  # type: ignore[operator]


def test_one_that_raises_costs_no_report(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("def pytest_nsa_decide(verdicts):\n    raise LookupError('no such row')\n")
    result = run_example(pytester, SOURCE)
    assert result.outcomes == {"passed": 1, "failed": 1}
    assert "pytest_nsa_decide failed: LookupError: no such row" in result.stdout
    assert "warm_up ends in FAIL (assertion) on rank 1" in result.stdout
