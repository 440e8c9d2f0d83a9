"""Runs whose ranks could not be started, and what a relative folder for evidence means to the processes that start them."""

from __future__ import annotations

import json

import pytest

from pytest_nsa.testing import HEADER, run_example, run_pytest

SOURCE = """
@scenario("first")
@world_size(2)
def test_a(group): pass

@scenario("second")
@world_size(2)
def test_b(group): pass
"""
BROKEN_IN_THE_CHILD = """
import os
if "PYTEST_NSA_ZYGOTE_FD" in os.environ:
    raise RuntimeError("no licence for a second process")
"""


def test_that_no_ranks_could_be_started_is_the_decision(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(BROKEN_IN_THE_CHILD)
    result = run_example(pytester, SOURCE, "--ranks-launch=clean")
    assert result.outcomes == {"failed": 2}
    assert result.run is not None
    for verdict in result.verdicts.values():
        assert (verdict.cause, verdict.rule) == ("unknown", "engine.refused")
        assert "no licence for a second process" in verdict.explanation
        assert verdict.advice.startswith("fix what kept the ranks from starting")
        assert verdict.time_to_verdict_s < 3600  # before, it was the time since 1970
    decision = json.loads((result.run / "decision.json").read_text())
    assert decision["sentence"].startswith("The ranks could not be started: ")
    assert decision["sentence"].endswith("2 of 2 scenarios did not run.")
    assert decision["action"].startswith("fix what kept the ranks from starting")
    assert decision["path"] == ["could the ranks be started? no, of 2 of 2 scenarios"]


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(("-p", "xdist", "-n", "2"), id="xdist", marks=pytest.mark.slow),
        pytest.param(("--ranks-launch=clean",), id="clean", marks=pytest.mark.slow),
        pytest.param((), id="fork"),
    ],
)
def test_a_folder_beside_the_tests_is_one_path_for_all_processes(
    pytester: pytest.Pytester, how: tuple[str, ...]
) -> None:
    """With pytest's cache on, as users have it: pytest refuses a cache folder with '..' in it."""
    inner = pytester.mkdir("inner")
    (inner / "test_example.py").write_text(HEADER + SOURCE)
    done = run_pytest(inner, ["--ranks-artifacts", "../evidence", f"--rootdir={inner}", *how], 120)
    done.assert_outcomes(passed=2)
    assert (pytester.path / "evidence" / "latest" / "first" / "result.txt").read_text() == "PASS\n"
