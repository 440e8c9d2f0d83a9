"""``python -m nsa.train`` where its results or its lines cannot be written: one line says so."""

from __future__ import annotations

import os
import subprocess
import sys
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


def test_a_pipe_in_the_place_of_a_file_is_refused_in_one_line(tmp_path: Path, warm: WarmPython) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    code, _, errors = warm.run_program("nsa.train", ROOT, [*TWO_STEPS, "--out", str(tmp_path)], 150, {})
    assert code == 2, errors
    assert errors.startswith(f"error: '{tmp_path / 'metrics.jsonl'}': is a pipe; ")
    assert len(errors.splitlines()) == 1


def test_a_closed_output_ends_a_run_in_one_line(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "nsa.train", *TWO_STEPS, "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, timeout=150)
    os.close(writer)
    assert done.returncode == 141, done.stderr
    assert done.stderr == "error: standard output was closed; what was written so far is kept\n"
