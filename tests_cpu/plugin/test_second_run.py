"""A failed test runs once more with its control flow recorded: its verdict names the statement at which its ranks parted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_nsa.testing import ExampleResult, run_example

AGAIN = ("--ranks-rerun", "auto")
PARTS = """
    @world_size(3)
    def test_it(group):
        best = 9.0
        for epoch in range(4):
            local = 5.0 - epoch + 4 * (group.rank == 1 and epoch == 2)
            if local > best:  # HERE
                break
            best = local
            dist.all_reduce(torch.ones(2))
        dist.barrier()
"""


def get_line(result: ExampleResult, folder: Path) -> int:
    lines = (folder / "test_example.py").read_text().splitlines()
    return next(n for n, line in enumerate(lines, start=1) if line.endswith("# HERE"))


def second_runs(result: ExampleResult) -> list[Path]:
    assert result.run is not None
    return sorted(result.run.glob("*/bisect-flow"))


def test_the_verdict_names_the_statement_and_its_values(pytester: pytest.Pytester) -> None:
    result = run_example(pytester, PARTS, *AGAIN)
    verdict = result.verdicts["test_it"]
    found = verdict.first_divergence
    line = get_line(result, pytester.path)
    assert (verdict.outcome, verdict.ranks, verdict.certain) == ("HANG", (1,), True)
    assert verdict.where == found["where"]
    assert found["where"] == f"test_example.py:{line} in test_it"
    assert (found["kind"], found["outcomes"]) == ("branch", {"false": [0, 2], "true": [1]})
    assert found["values"]["local"] == {"0": "3.0", "1": "7.0", "2": "3.0"}
    assert f"test_example.py:{line - 1} in test_it" in found["because"][0]["where"]
    assert len(second_runs(result)) == 1
    page = (result.run / "report.html").read_text()
    assert 'class="excerpt diverged"' in page
    # With --sources, as the home folder is the tests' root here.
    command = [sys.executable, "-m", "pytest_nsa", "diagnose", "--sources", "--json", str(second_runs(result)[0])]
    done = subprocess.run(command, text=True, capture_output=True, timeout=60, check=False)
    assert json.loads(done.stdout)["first_divergence"]["outcomes"] == found["outcomes"]


def test_a_failure_that_does_not_come_again_stays_one(pytester: pytest.Pytester) -> None:
    source = """
        import os
        @world_size(2)
        def test_it(group):
            was = os.path.exists("was_here")
            dist.barrier()
            open("was_here", "w").close()
            if group.rank and not was:
                raise RuntimeError("the first time")
            dist.barrier()
    """
    result = run_example(pytester, source, *AGAIN)
    verdict = result.verdicts["test_it"]
    assert (verdict.outcome, verdict.cause, verdict.ranks) == ("FAIL", "rank_exception", (1,))
    assert [fact.kind for fact in verdict.evidence if fact.kind == "second_run"] == ["second_run"]
    assert verdict.first_divergence == {}
    assert result.outcomes == {"failed": 1}


@pytest.mark.parametrize(
    ("mark", "options"),
    [("@rerun(False)", AGAIN), ("", ("--ranks-rerun", "off")), ("", (*AGAIN, "--pdb"))],
    ids=["mark", "option", "pdb"],
)
def test_a_test_that_must_run_once_does(mark: str, options: tuple[str, ...], pytester: pytest.Pytester) -> None:
    result = run_example(pytester, PARTS.replace("@world_size(3)", f"@world_size(3)\n    {mark}"), *options)
    assert result.verdicts["test_it"].outcome == "HANG"
    assert second_runs(result) == []


def test_five_tests_of_a_session_run_again(pytester: pytest.Pytester) -> None:
    source = """
        @pytest.mark.parametrize("number", range(6))
        @world_size(2)
        def test_it(group, number):
            if group.rank:
                raise RuntimeError(number)
            dist.barrier()
    """
    assert len(second_runs(run_example(pytester, source, *AGAIN))) == 5


def test_tests_that_fail_alike_on_all_ranks_do_not_run_again(pytester: pytest.Pytester) -> None:
    source = """
        @world_size(2)
        def test_it(group):
            assert group.world_size == 3
    """
    assert second_runs(run_example(pytester, source, *AGAIN)) == []


def test_parameters_that_differ_lead_to_the_statement_that_one_rank_executed_otherwise(
    pytester: pytest.Pytester,
) -> None:
    source = """
        @world_size(3)
        @check_divergence
        def test_it(ddp):
            torch.manual_seed(0)
            model = ddp.wrap(torch.nn.Linear(4, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(3):
                optimizer.zero_grad()
                loss = model(torch.randn(2, 4)).sum()
                loss.backward()
                scale = 2.0 if (ddp.rank, step) == (1, 1) else 1.0
                if scale > 1:  # HERE
                    with torch.no_grad():
                        model.module.weight.mul_(scale)
                optimizer.step()
    """
    result = run_example(pytester, source, *AGAIN)
    verdict = result.verdicts["test_it"]
    found = verdict.first_divergence
    assert (verdict.cause, verdict.ranks) == ("silent_divergence", (1,))
    line = get_line(result, pytester.path)
    assert found["where"] in (f"test_example.py:{line} in test_it", f"test_example.py:{line - 1} in test_it")
    assert sorted(found["outcomes"].values()) == [[0, 2], [1]]


def test_two_ranks_of_which_one_loads_other_weights(pytester: pytest.Pytester) -> None:
    source = """
        from pytest_nsa import check_divergence
        @check_divergence
        @world_size(2)
        def test_it(ddp):
            model = ddp.wrap(torch.nn.Linear(4, 2))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(3):
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 1 and ddp.rank == 0:  # HERE
                    model.module.load_state_dict({k: v / 2 for k, v in model.module.state_dict().items()})
    """
    result = run_example(pytester, source, *AGAIN)
    verdict = result.verdicts["test_it"]
    line = get_line(result, pytester.path)
    assert (verdict.cause, verdict.ranks) == ("silent_divergence", (0, 1))
    assert verdict.first_divergence["where"] == f"test_example.py:{line} in test_it"
    assert f"{line} | if step == 1 and ddp.rank == 0:" in result.stdout
