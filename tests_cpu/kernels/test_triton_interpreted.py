"""The Triton kernels against float64, in Triton's interpreter: no GPU is needed."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", minversion="3.7")  # the interpreter of 3.6 fails under numpy 2.4

ROOT = Path(__file__).resolve().parents[2]
# The checks of one process. Some change, for the rest of their process, how work is cut.
QUICK = (("whole",), ("decoding", "large_scores"))
SLOW = (
    ("rotary",),
    ("window", "selection", "lists"),
    ("compression", "segments", "selected"),
    ("one_tile",),
    ("ranges",),
    ("wholes",),
    ("selected_blocks",),
    ("selected_on_hopper",),
    ("tiles",),
    ("groups",),
    ("any_shape",) * 5,
)


@pytest.mark.parametrize(
    "checks", [*QUICK, *(pytest.param(checks, marks=pytest.mark.slow) for checks in SLOW)], ids=",".join
)
def test_interpreted(checks: tuple[str, ...]) -> None:
    seed = str(random.randrange(1 << 30))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests_cpu.kernels.interpreted", seed, *checks], cwd=ROOT, text=True, timeout=170,
        capture_output=True, check=False, env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.stdout.splitlines() == [f"held {name}" for name in checks], f"seed {seed}: {done.stderr[-3000:]}"
