"""A disk for artifacts that is read-only, full or fills up, or a limit on files: the tests' outcomes stay the same."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nsa.trace.board import Board
from pytest_nsa.session.folders import BOARD
from pytest_nsa.testing import HEADER
from tests_cpu.namespaces import MOUNT, in_namespace
from tests_cpu.warm import WarmPython

SOURCE = (
    HEADER
    + """
import errno, pathlib

@world_size(2)
def test_pass(group): dist.barrier()

def test_fill():
    if "FILL" in os.environ:
        with pytest.raises(OSError):
            with open(pathlib.Path("artifacts", "filler"), "wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 16))

@world_size(2)
def test_after(group): dist.barrier()

@world_size(2)
@pytest.mark.timeout(20)
def test_fail(group):
    assert group.rank == 0, "rank 1 is wrong"
"""
)


def run_on_a_small_disk(
    warm: WarmPython, folder: Path, size: str, *options: str, fill: bool = False
) -> tuple[str, Path]:
    """Run SOURCE with ``artifacts`` on a disk of its own; return the output, and the folder of evidence without room there."""
    (folder / "test_example.py").write_text(SOURCE)
    (folder / "artifacts").mkdir()
    (folder / "tmp").mkdir()
    mount = f"mount -t tmpfs -o size={size} none artifacts"
    session = ("pytest", "-p", "no:cacheprovider", "-p", "no:randomly", "--basetemp", str(folder / "base"))
    variables = {"TMPDIR": str(folder / "tmp"), **({"FILL": "1"} if fill else {})}
    done = warm.call(*in_namespace(MOUNT, mount, *session, *options), cwd=folder, env={**os.environ, **variables})
    print(done.stdout, done.stderr)
    return done.stdout + done.stderr, next(folder.glob("tmp/pytest-nsa-*")) / "artifacts" / "latest"


def is_whole(run: Path) -> None:
    """Assert that a run's reports are there, and the verdict of the test that failed."""
    assert "rank 1 is wrong" in (run / "SUMMARY.md").read_text()
    assert (run / "report.html").is_file()
    assert (run / "test_example.py-test_fail-" / "verdict.json").is_file() or list(run.glob("*test_fail*/verdict.json"))


def left_elsewhere(folder: Path) -> None:
    """Assert that the evidence of the test that failed is on another disk, with its verdict."""
    (found,) = folder.glob("tmp/pytest-nsa-*/artifacts/*/*test_fail*/verdict.json")
    assert "rank 1 is wrong" in found.read_text()


def test_the_space_that_is_set_aside_holds_a_board(tmp_path: Path) -> None:
    """Else a rank that starts when the disk has become full ends."""
    Board(tmp_path / "board.bin")
    assert (tmp_path / "board.bin").stat().st_size <= BOARD


def test_a_full_disk(warm: WarmPython, tmp_path: Path) -> None:
    output, spare = run_on_a_small_disk(warm, tmp_path, "600k")
    assert "1 failed, 3 passed" in output, output
    assert output.count("artifacts: No space left on device: evidence goes to") == 1
    assert "Traceback" not in output.replace('Traceback (most recent call last):\n  File "' + str(tmp_path), "")
    is_whole(spare)


@pytest.mark.parametrize("options", [(), pytest.param(("-n", "2", "--dist", "loadgroup"), marks=pytest.mark.slow)])
def test_a_disk_that_fills_up(warm: WarmPython, tmp_path: Path, options: tuple[str, ...]) -> None:
    output, _ = run_on_a_small_disk(warm, tmp_path, "12m", *options, fill=True)
    assert "1 failed, 3 passed" in output, output
    assert output.count("No space left on device: evidence of further tests goes to") == 1
    left_elsewhere(tmp_path)


LIMITED = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]) * 1024,) * 2)  # as the shell's ulimit -f
sys.argv[1:] = ["-p", "no:cacheprovider", "-p", "no:randomly", "-q"]
runpy.run_module("pytest", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("limit", "says"),
    [
        (100, "ulimit -f limits files to 100 KiB: what ranks write beyond that is dropped"),
        (20, "ERROR: ulimit -f limits files to 20 KiB, and a rank's evidence needs 48: raise it"),
    ],
)
def test_a_limit_on_files(warm: WarmPython, tmp_path: Path, limit: int, says: str) -> None:
    (tmp_path / "test_example.py").write_text(SOURCE)
    done = warm.call("-c", LIMITED, str(limit), cwd=tmp_path)
    output = done.stdout + done.stderr
    assert output.count(says) == 1, output
    if limit == 100:
        assert "1 failed, 3 passed" in output
        is_whole(tmp_path / "artifacts" / "latest")
