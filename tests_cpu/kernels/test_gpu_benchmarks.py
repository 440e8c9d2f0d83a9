"""The GPU benchmarks run to their end where there is no GPU: in Triton's interpreter, on a tiny shape."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytest.importorskip("triton", minversion="3.6")


def run(command: str, *, interpret: bool = True) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment |= {"TRITON_INTERPRET": "1" if interpret else "0"}
    words = [sys.executable, *command.split()]
    return subprocess.run(words, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=150)


@pytest.mark.slow
def test_every_contender_is_measured_or_absent_for_a_reason() -> None:
    done = run("benchmarks/attention_gpu.py --dry-run --lengths 70 --rounds 1")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["shapes"]["tiny"]["70"]
    for name in ("sliding", "compressed", "selected", "nsa", "flash", "cudnn"):
        assert found["ms"]["events"][f"{name} forward"] > 0
        assert f"{name} backward" in found["ms"]["events"]
    assert set(found["absent"]) == {"flex", "flash_attn", "cudnn_nsa", "fla"}
    for way in ("forward", "backward"):
        assert found["over_fastest_dense"][way]["dense"] in ("flash", "cudnn")


def test_without_a_gpu_nothing_is_measured() -> None:
    done = run("benchmarks/attention_gpu.py", interpret=False)
    assert done.returncode == 1
    assert "no GPU here; --dry-run with TRITON_INTERPRET=1" in done.stderr


@pytest.mark.slow
def test_tile_sizes_are_tried_and_merged(tmp_path: Path) -> None:
    table = tmp_path / "tiles.json"
    table.write_text('{"sm_80": {"sliding 64/64 2": [128, 64, 4, 2]}}')
    done = run(f"benchmarks/tune_gpu.py --json {table} --length 40 --rounds 1 --kernels importance --minutes 0.3")
    assert done.returncode == 0, done.stderr
    found = json.loads(table.read_text())
    assert found["sm_80"] == {"sliding 64/64 2": [128, 64, 4, 2]}
    assert [len(sizes) for sizes in found["interpreter"].values()] == [7]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["kernel"] == "importance 16/16 2 short"
    assert len(said["ms"]) > 1  # as many as the minutes allow
