"""The GPU suite on a machine without a GPU: its tests are listed, and skipped for one clear reason."""

import os
import re
from pathlib import Path

import pytest

from nsa.kernels.triton import support
from tests_cpu.plan.scenarios import TABLE
from tests_cpu.warm import WarmPython

ROOT = Path(__file__).resolve().parents[1]


def run(warm: WarmPython, *arguments: str) -> str:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = warm.call("-m", "pytest", "-p", "no:cacheprovider", *arguments, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_every_scenario_is_listed(warm: WarmPython) -> None:
    listed = run(warm, "tests_gpu", "--collect-only", "-q", "-m", "gpu or long")  # as docs/walk.md has it
    for row in TABLE:
        assert f"test_scenario[{row.name}]" in listed


def test_they_are_skipped_for_one_reason(warm: WarmPython, tmp_path: Path) -> None:
    text = run(warm, "tests_gpu", "-m", "gpu", "-rs", "--ranks-artifacts", str(tmp_path / "evidence"))
    reasons = [line for line in text.splitlines() if line.startswith("SKIPPED")]
    if support.why_no_triton():  # that of torch 2.6
        reasons = [line for line in reasons if "module 'triton' has __version__" not in line]
    assert len(reasons) == 1
    # Left out by -m gpu are only those of more than 100 steps.
    listed = re.search(r"collected \d+ items / (\d+) deselected (?:/ \d+ skipped )?/ (\d+) selected\n", text)
    assert int(listed[1]) == sum(row.steps > 100 for row in TABLE)
    assert reasons[0].startswith(f"SKIPPED [{listed[2]}]")
    assert "needs a GPU" in reasons[0]
    assert not (tmp_path / "evidence").exists()  # nothing was started for tests that are all skipped
