"""Each fault of ``make plan FAULT=...`` is named by scenario, rank, line and cause, and the exit code is 1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_nsa import testing

ROOT = Path(__file__).resolve().parents[1]
DDP = {
    "ddp_onestep_trace",
    "ddp_gloo_sanity",
    "branch_cmp_only",
    "branch_sel_only",
    "branch_win_only",
    "ddp_static_graph",
}


def run_plan(fault: str, folder: Path) -> tuple[str, dict[str, dict[str, Any]]]:
    """Return SUMMARY.md and the verdicts by scenario of a run of the plan with a fault."""
    arguments = [
        "tests_cpu/plan/test_plan.py",
        "--phases",
        "1-5",
        "--fault",
        fault,
        "--artifacts",
        str(folder),
        "-o",
        "ranks_hang_after=2.5",
    ]
    done = testing.run_pytest(ROOT, [*arguments, "-p", "no:cacheprovider", "-p", "no:randomly"], 170)
    assert done.ret == 1
    run = folder / "latest"
    assert str(run.resolve() / "SUMMARY.md") in done.stdout.str()
    verdicts = {p.parent.name: json.loads(p.read_text()) for p in run.glob("*/verdict.json")}
    for name, verdict in verdicts.items():
        assert (run / name / "result.txt").read_text() == verdict["outcome"] + "\n"
    return (run / "SUMMARY.md").read_text(), verdicts


def failing(verdicts: dict[str, dict[str, Any]]) -> set[str]:
    return {name for name, verdict in verdicts.items() if verdict["outcome"] != "PASS"}


def source_line(where: str) -> str:
    file, _, rest = where.partition(":")
    return (ROOT / file).read_text().splitlines()[int(rest.split()[0]) - 1].strip()


def test_deadlock_in_the_selection_branch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSA_FORCE_BRANCH", "win")  # exported for another run: a scenario ignores it
    monkeypatch.setenv("NSA_GC_RANGE", "0:1")
    summary, verdicts = run_plan("sel_backward_deadlock", tmp_path)
    assert "| `NSA_FORCE_BRANCH` | `win` |" in summary
    assert failing(verdicts) == DDP - {"branch_cmp_only", "branch_win_only"}
    for name in failing(verdicts):
        verdict = verdicts[name]
        assert (verdict["outcome"], verdict["cause"], verdict["ranks"]) == ("HANG", "lock_deadlock", [1])
        assert source_line(verdict["where"]) == "with never_released:"
        assert verdict["module"] == "blocks.11.attn"
        assert "blocks.11.attn.k_sel.weight" in verdict["parameters_missing"]
        assert "blocks.11.attn.out.weight" not in verdict["parameters_missing"]
    first = summary.splitlines()[0]
    for words in (
        "branch_sel_only",
        "HANG",
        "lock_deadlock",
        "rank 1",
        "tests_cpu/plan/faults.py:",
        "4 of 9 scenarios fail",
    ):
        assert words in first
    assert "**Fix the backward of branch sel" in summary
    assert "does one branch alone fail? yes: branch_sel_only" in summary


@pytest.mark.slow
def test_a_skipped_all_reduce(tmp_path: Path) -> None:
    summary, verdicts = run_plan("rank1_skips_allreduce", tmp_path)
    assert failing(verdicts) == DDP
    for name in DDP:
        verdict = verdicts[name]
        assert (verdict["outcome"], verdict["cause"], verdict["ranks"]) == ("HANG", "skipped_collective", [1])
        assert verdict["certain"]
        assert source_line(verdict["where"]) == "dist.all_reduce(figures)"
    first = summary.splitlines()[0]
    for words in ("ddp_onestep_trace", "skipped_collective", "rank 1", "nsa/training/trainer.py:"):
        assert words in first


@pytest.mark.slow
def test_reentrant_checkpointing(tmp_path: Path) -> None:
    summary, verdicts = run_plan("gc_reentrant", tmp_path)
    assert failing(verdicts) == DDP - {"ddp_static_graph"}
    for name in failing(verdicts):
        verdict = verdicts[name]
        assert (verdict["outcome"], verdict["cause"], verdict["ranks"]) == ("FAIL", "ready_twice", [0, 1])
        assert verdict["module"] == "blocks.11.mlp.fc2.weight"
        assert "parameter 192" in verdict["reason"]
        assert source_line(verdict["where"]) == "(loss / len(batches)).backward()"
    assert "ready_twice" in summary.splitlines()[0]
    assert "**Enable static_graph in production" in summary


@pytest.mark.slow
def test_a_killed_rank(tmp_path: Path) -> None:
    summary, verdicts = run_plan("rank1_killed", tmp_path)
    assert failing(verdicts) == DDP
    for name in DDP:
        verdict = verdicts[name]
        assert (verdict["outcome"], verdict["cause"], verdict["ranks"]) == ("CRASH", "rank_died", [1])
        assert "SIGKILL in backward of step 1" in verdict["reason"]
        assert verdict["where"].startswith("nsa/")
        assert verdict["duration_s"] < 20  # of the 30 that it has
    first = summary.splitlines()[0]
    for words in ("ddp_onestep_trace", "CRASH", "rank_died", "rank 1", "SIGKILL"):
        assert words in first
