"""``python -m nsa.train`` where its results or its lines cannot be written: one line says so."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests_cpu.warm import WarmPython

ROOT = Path(__file__).resolve().parents[2]
TWO_STEPS = ["--config", str(ROOT / "configs" / "tiny_cpu.yaml"), "--steps", "2"]


@pytest.mark.parametrize("name", ["traces.log", "gate_health.jsonl", "metrics.jsonl"])
def test_a_file_that_cannot_be_written_is_named_in_one_line(tmp_path: Path, warm: WarmPython, name: str) -> None:
    """A full disk at the start and after a step (/dev/full refuses each write as one does), and a folder in a file's place."""
    path = tmp_path / name
    full, is_folder = f"No space left on device: the results in {tmp_path}", name == "metrics.jsonl"
    path.mkdir() if is_folder else path.symlink_to("/dev/full")
    code, _, errors = warm.run_program("nsa.train", ROOT, [*TWO_STEPS, "--out", str(tmp_path)], 150, {})
    assert code == 2, errors
    assert errors.startswith(f"error: {f'Is a directory: {path}' if is_folder else full} cannot be written; ")
    assert len(errors.splitlines()) == 1


def test_output_that_nobody_reads_ends_the_training_in_one_line(tmp_path: Path, warm: WarmPython) -> None:
    command = ("-m", "nsa.train", *TWO_STEPS, "--out", str(tmp_path))
    with warm.popen(*command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as training:
        assert training.stdout is not None
        assert training.stderr is not None
        training.stdout.close()
        errors = training.stderr.read()
    assert training.returncode == 130, errors
    assert len(errors.splitlines()) == 1
