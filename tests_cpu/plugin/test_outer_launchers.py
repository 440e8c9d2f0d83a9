"""Under torchrun and SLURM each process is a rank: all run the same tests, and rank 0's process reports."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from pytest_nsa.diagnosis.verdict import Verdict
from pytest_nsa.testing import HEADER, read_result, run_example
from tests_cpu.plugin.sessions import run_under_slurm, run_under_torchrun, start_slurm_task
from tests_cpu.sockets import free_port
from tests_cpu.warm import WarmPython

SOURCE = """
@pytest.mark.parametrize("n", range(2))
@world_size(2)
def test_passes(group, n):
    total = torch.tensor(group.rank + 1.0)
    dist.all_reduce(total)
    assert total.item() == 3
    print("said by", group.rank)

def test_takes_the_launcher_s_number(group): assert group.world_size == 2

@world_size(2)
def test_fails_on_rank_1(group):
    assert group.rank == 0
    dist.barrier()

@world_size(2)
def test_dies_on_rank_1(group):
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()

@world_size(2)
def test_skips_a_collective(group):
    if group.rank != 1:
        dist.all_reduce(torch.ones(1))
    dist.barrier()

@world_size(3)
def test_of_another_size(group): pass

@world_size(2)
def test_foreseen(group): pytest.xfail("known")

def test_in_every_process(): pass

@world_size(2)
def test_after(group): dist.barrier()
"""
COUNTS = "3 failed, 5 passed, 1 skipped, 1 xfailed"


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each suite ask for ranks before it is collected, as by a conftest.py that imports the plugin."""
    monkeypatch.setenv("PYTEST_ADDOPTS", "-o ranks_marks=true")


def read_verdicts(folder: Path) -> dict[str, Verdict]:
    return read_result(folder, pytest.RunResult(1, [], [], 0)).verdicts


def check_report(text: str, run: Path) -> None:
    assert text.count("test session starts") == 1  # one process reports
    assert COUNTS in text
    assert "FAIL: rank 1 of 2, rank_exception" in text
    assert "CRASH: rank 1 of 2, rank_died" in text
    assert "HANG: rank 1 of 2, skipped_collective" in text
    assert "needs 3 ranks, and the launcher has started 2" in text
    folder = next(run.glob("*test_fails_on_rank_1*"))
    assert (folder / "rank1" / "board.bin").is_file()
    assert "assert 1 == 0" in (folder / "rank1" / "reports.jsonl").read_text()


def test_torchrun(warm: WarmPython, pytester: pytest.Pytester) -> None:
    (pytester.path / "test_example.py").write_text(HEADER + SOURCE)
    done = run_under_torchrun(warm, pytester.path, "-rs")
    assert done.returncode == 1
    check_report(done.stdout, pytester.path / "artifacts" / "latest")


@pytest.mark.slow
def test_slurm_s_variables(warm: WarmPython, pytester: pytest.Pytester) -> None:
    (pytester.path / "test_example.py").write_text(HEADER + SOURCE)
    (code, text), follower = run_under_slurm(warm, pytester.path, "-rs")
    assert code == 1
    check_report(text, pytester.path / "artifacts" / "latest")
    assert follower == (1, "")


@pytest.mark.slow
def test_exit_first_ends_all(warm: WarmPython, pytester: pytest.Pytester) -> None:
    (pytester.path / "test_example.py").write_text(HEADER + SOURCE)
    (code, text), (of_follower, _) = run_under_slurm(warm, pytester.path, "-x")
    assert "1 failed, 3 passed" in text
    assert (code, of_follower) == (1, 1)


@pytest.mark.slow
def test_a_process_with_other_tests_is_refused_with_the_difference(warm: WarmPython, pytester: pytest.Pytester) -> None:
    (pytester.path / "test_example.py").write_text(HEADER + SOURCE)
    lacks = ("--deselect=test_example.py::test_after",)
    (code, text), (of_follower, _) = run_under_slurm(warm, pytester.path, rank_1=lacks)
    assert (code, of_follower) == (pytest.ExitCode.USAGE_ERROR,) * 2
    assert (
        "rank 1's process collected other tests on ranks than rank 0's: it lacks test_example.py::test_after; "
        "give all the same checkout and arguments" in text
    )


@pytest.mark.slow
def test_a_process_that_dies_ends_the_test_on_all(warm: WarmPython, pytester: pytest.Pytester) -> None:
    source = """
@world_size(2)
def test_loses_a_node(group, artifacts):
    if group.rank == 1:
        os.kill(int(os.environ["FOLLOWER"]), signal.SIGKILL)  # the pytest process, and with it this rank
    dist.barrier()

@world_size(2)
@pytest.mark.parametrize("n", range(2))
def test_later(group, n): dist.barrier()
"""
    (pytester.path / "test_example.py").write_text(HEADER + source)
    (pytester.path / "conftest.py").write_text("import os\nos.environ['FOLLOWER'] = str(os.getpid())\n")
    (code, text), (of_follower, _) = run_under_slurm(warm, pytester.path)
    assert (code, of_follower) == (1, -signal.SIGKILL)
    assert "CRASH: rank 1 of 2, rank_died" in text
    later = [v for name, v in read_verdicts(pytester.path).items() if name.startswith("test_later")]
    assert [v.cause for v in later] == ["unknown"] * 2  # not waited for again
    assert all("rank 1's process was lost in test_example.py::test_loses_a_node" in v.reason for v in later)


def test_what_a_process_waits_for_is_printed(warm: WarmPython, pytester: pytest.Pytester) -> None:
    (pytester.path / "test_example.py").write_text(HEADER + "@world_size(2)\ndef test_it(group): pass\n")
    leader = start_slurm_task(warm, pytester.path, 0, free_port())
    assert leader.stdout is not None
    found = next((line for line in leader.stdout if "waits for rank 1's process to collect its tests" in line), "")
    leader.kill()
    leader.communicate(timeout=30)
    assert found


def test_xdist_under_a_launcher_is_refused(warm: WarmPython, pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it(): pass")
    process = start_slurm_task(warm, pytester.path, 0, free_port(), "-n2")
    assert "-n under torchrun or SLURM: each of its processes is a rank already" in process.communicate(timeout=60)[0]
    assert process.returncode == pytest.ExitCode.USAGE_ERROR


def test_a_world_of_one_is_no_launcher_s_and_an_unknown_host_is_refused(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container that sets RANK=0 and WORLD_SIZE=1."""
    source = "@world_size(2)\ndef test_it(group): dist.barrier()\n"
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "256.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert run_example(pytester, source).outcomes == {"passed": 1}
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = run_example(pytester, source)
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert "MASTER_ADDR = 256.0.0.1: " in result.stderr
    assert "unset RANK to run without" in result.stderr
