"""The Triton kernels against float64, in Triton's interpreter: no GPU is needed."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]
CHECKS = ("window", "compression", "selection", "selected_by_query", "selected_by_block", "whole")


@pytest.mark.parametrize("check", CHECKS)
def test_interpreted(check: str) -> None:
    seed = str(random.randrange(1 << 30))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests_cpu.kernels.interpreted", check, seed], cwd=ROOT, text=True, timeout=170,
        capture_output=True, check=False, env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.stdout == "held\n", f"seed {seed}: {done.stderr[-3000:]}"
