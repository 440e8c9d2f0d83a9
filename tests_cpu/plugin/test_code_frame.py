"""A failure as lines of source with labels: in verdict.json, in the terminal, as GitHub's annotations; and the pages of causes."""

from __future__ import annotations

import re

import pytest

from pytest_nsa.cli.main import main
from pytest_nsa.diagnosis.causes import CAUSES
from pytest_nsa.testing import run_example
from tests_cpu.faults.rows import read_rows

HANGS = """
import torch, torch.distributed as dist
from pytest_nsa import world_size

def mean(x):
    dist.all_reduce(x)

@world_size(3)
def test_skips(group):
    for step in range(4):
        if group.rank != 1 or step != 2:
            mean(torch.ones(5))
    dist.barrier()

@world_size(2)
def test_asserts(group):
    assert group.rank > 5
"""


@pytest.fixture
def on_github(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)


def test_each_side_has_a_label_at_its_line(pytester: pytest.Pytester, on_github: None) -> None:
    result = run_example(pytester, HANGS, "--ranks-verbose")
    lines = (pytester.path / "test_example.py").read_text().splitlines()
    verdict = result.verdicts["test_skips"]
    found = {(lines[label.line - 1].strip(), label.ranks, label.text) for label in verdict.labels}
    assert ("dist.barrier()", (1,), "waits here: barrier #4, step = 3") in found
    assert ("dist.all_reduce(x)", (0, 2), "waits here: allreduce #4 (float32 x 5)") in found
    assert len(verdict.reason.split()) <= 15
    assert verdict.because
    assert set(verdict.because) <= set(result.stdout.splitlines())
    frame = [line for line in result.stdout.splitlines() if " | " in line and "<- " in line]
    assert any(
        re.fullmatch(r" +\d+ \| dist\.barrier\(\) +<- rank 1 waits here: barrier #4, step = 3", line) for line in frame
    )
    assert "  more     pytest-nsa explain skipped_collective" in result.stdout
    annotated = re.findall(r"^::(\w+) file=test_example\.py,line=(\d+),", result.stdout, re.M)
    blamed = verdict.where.partition(":")[2].partition(" ")[0]
    assert ("error", blamed) in annotated
    assert sum(level == "error" and line == blamed for level, line in annotated) == 1
    assert len(annotated) >= 3


def test_ranks_that_only_raise_keep_pytest_s_form(pytester: pytest.Pytester) -> None:
    result = run_example(pytester, HANGS, "-k", "asserts")
    assert result.verdicts["test_asserts"].ranks == (0, 1)
    assert "<- " not in result.stdout
    assert ">       assert group.rank > 5" in result.stdout or ">   assert group.rank > 5" in result.stdout


@pytest.mark.parametrize("name", CAUSES)
def test_each_cause_has_a_page(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", name]) == 0
    assert capsys.readouterr().out.startswith(f"# {name}\n")


def test_a_name_that_is_no_cause_gets_the_nearest_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "../skipped_colective"]) == 2
    assert "skipped_collective" in capsys.readouterr().err


def test_rows_name_causes_with_pages() -> None:
    assert {row.cause for row in read_rows()} <= set(CAUSES)
