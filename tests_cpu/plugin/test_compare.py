"""Runs beside each other: what was planted in the second is found, and between equal runs nothing."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_nsa.cli.main import main
from pytest_nsa.diagnosis.verdict import Verdict
from pytest_nsa.report.compare import Difference, compare
from pytest_nsa.testing import HEADER, run_folder

# Steps that wait for a clock, so that they take as long on a busy machine; LOST and OTHER plant the changes.
SOURCE = """
def test_steady(ddp):
    model = ddp.wrap(torch.nn.Linear(4, 4))
    for _ in range(14):
        model(torch.ones(2, 4)).sum().backward()
        time.sleep(0.05)

@pytest.mark.timeout(20)
def test_fails(ddp):
    model = ddp.wrap(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
    layer = model.module[1 if os.environ.get("LOST") else 0]  # backward comes to the second first
    layer.weight.register_hook(lambda grad: threading.Event().wait() if ddp.rank else None)
    model(torch.ones(2, 4)).sum().backward()

def test_cause(group):
    if group.rank == 1:
        if os.environ.get("OTHER"): os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("the usual")
    dist.barrier()

def test_records(group, record_property): record_property("accuracy", 0.5)
"""


def a_run(folder: Path, **variables: str) -> Path:
    (folder / "test_example.py").write_text(HEADER + SOURCE)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        result = run_folder(folder, "-o", "ranks_hang_after=2")
    return result.run


def test_a_lost_gradient_a_changed_cause_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a busy machine changes, the time of a step, is left to `test_what_counts_as_worse`."""
    runs = {}
    for name, variables in {"a": {}, "new": {"OTHER": "1", "LOST": "1"}}.items():
        (tmp_path / name).mkdir()
        runs[name] = a_run(tmp_path / name, **variables)
    capsys.readouterr()
    assert main(["compare", str(runs["a"]), str(runs["new"])]) == 1
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if line.startswith("| test_example") and "| step |" not in line]
    hooked = [path.read_text() for path in runs["new"].glob("*test_fails*/rank1/stacks.txt")]
    # If not, a busy machine gave the rank no CPU: the cause is wider then.
    if not any("in <lambda>" in stack for stack in hooked):
        rows = [row for row in rows if "test_fails | cause" not in row]
    assert len(rows) == 2, printed
    assert any("test_fails | gradients missing" in row and "worse" in row for row in rows)
    assert any("test_cause | cause" in row and "worse" in row for row in rows)
    assert main(["compare", str(tmp_path), str(runs["a"])]) == 2
    assert "no run here" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "garbage\n"])
def test_a_run_without_a_verdict_is_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    (tmp_path / "verdicts.jsonl").write_text(text)
    assert main(["compare", str(tmp_path), str(tmp_path)]) == 2
    assert "its verdicts.jsonl has no verdict that can be read" in capsys.readouterr().err


def figures(step: float, steps: int = 20, spread: float = 0.03, **more: float) -> dict[str, float]:
    return {
        "steps": steps,
        "step_ms": step,
        "step_ms_low": step * (1 - spread),
        "step_ms_high": step * (1 + spread),
        **more,
    }


def verdict(name: str, outcome: str = "PASS", **fields: object) -> Verdict:
    return Verdict(nodeid=name, outcome=outcome, **fields)  # type: ignore[arg-type]


def kinds(found: list[Difference]) -> list[tuple[str, str, str]]:
    return [(d.test, d.what, d.kind) for d in found]


SLEEPS = {"outcome": "HANG", "cause": "sleeping"}
# The fields of a test in one run and in the next; None where it did not run.
CHANGES: dict[str, tuple[dict[str, Any] | None, dict[str, Any] | None]] = {
    "slow": ({"figures": figures(10)}, {"figures": figures(13)}),
    "noisy": ({"figures": figures(10, spread=0.3)}, {"figures": figures(13, spread=0.3)}),
    "few": ({"figures": figures(10, steps=3)}, {"figures": figures(20, steps=3)}),
    "instant": ({"figures": figures(0)}, {"figures": figures(0)}),
    "heavy": ({"figures": {"peak_mib": 400, "added_mib": 60}}, {"figures": {"peak_mib": 400, "added_mib": 110}}),
    "light": ({"figures": {"peak_mib": 400, "added_mib": 10}}, {"figures": {"peak_mib": 400, "added_mib": 20}}),
    # A fork of a larger process.
    "parent": ({"figures": {"peak_mib": 318, "added_mib": 60}}, {"figures": {"peak_mib": 379, "added_mib": 61}}),
    "loss": ({"figures": {"loss": 2.0}}, {"figures": {"loss": 2.1}}),
    "lost": ({**SLEEPS, "parameters_missing": ("a",)}, {**SLEEPS, "parameters_missing": ("a", "b")}),
    "moved": ({**SLEEPS, "where": "a.py:3 in f"}, {**SLEEPS, "where": "a.py:9 in f"}),
    "mended": ({"outcome": "FAIL", "cause": "assertion"}, {}),
    "gone": ({}, None),
    "new": (None, {}),
}


def test_what_counts_as_worse() -> None:
    base, new = (
        {name: verdict(name, **runs[n]) for name, runs in CHANGES.items() if runs[n] is not None} for n in (0, 1)
    )
    assert kinds(compare([base], [new])) == [
        ("slow", "step", "worse"),
        ("heavy", "added_mib", "worse"),
        ("loss", "loss", "worse"),
        ("lost", "gradients missing", "worse"),
        ("gone", "ran", "changed"),
        ("new", "ran", "changed"),
        ("mended", "outcome", "better"),
    ]
    again = {**base, "slow": replace(base["slow"], figures=figures(13.5))}
    assert ("slow", "step", "worse") not in kinds(compare([base, again], [new])), "repeats differ by as much"
    again = {**base, "heavy": verdict("heavy", figures={"added_mib": 115})}
    assert ("heavy", "added_mib", "worse") not in kinds(compare([base, again], [new])), "repeats differ by as much"


def test_a_machine_that_is_slower_is_no_regression() -> None:
    base = {f"t{i}": verdict(f"t{i}", figures=figures(10 + i)) for i in range(6)}
    new = {name: replace(v, figures=figures(1.4 * v.figures["step_ms"])) for name, v in base.items()}
    assert compare([base], [new]) == []
    new["t2"] = replace(new["t2"], figures=figures(1.4 * 1.3 * 12))
    assert kinds(compare([base], [new])) == [("t2", "step", "worse")]
