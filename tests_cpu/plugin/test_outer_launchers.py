"""Under torchrun and SLURM each process is a rank: all run the same tests, and rank 0's process reports."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from pytest_nsa.diagnosis.verdict import Verdict
from pytest_nsa.testing import HEADER, read_result, run_example
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


def slurm(warm: WarmPython, pytester: pytest.Pytester, rank: int, port: int, *arguments: str) -> subprocess.Popen[str]:
    """Start one task of a SLURM job that exports MASTER_ADDR and MASTER_PORT."""
    env = {
        **os.environ,
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return warm.popen("-m", "pytest", "-p", "no:cacheprovider", *arguments, cwd=pytester.path, env=env, **pipes)


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
    launcher = ("-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port", str(free_port()))
    session = ("-m", "pytest", "-p", "no:cacheprovider", "-rs")
    done = warm.call(*launcher, *session, cwd=pytester.path, stderr=subprocess.STDOUT, timeout=150, nursery=True)
    assert done.returncode == 1
    check_report(done.stdout, pytester.path / "artifacts" / "latest")


@pytest.mark.slow
def test_slurm_s_variables(warm: WarmPython, pytester: pytest.Pytester) -> None:
    (pytester.path / "test_example.py").write_text(HEADER + SOURCE)
    port = free_port()
    follower, leader = slurm(warm, pytester, 1, port, "-rs"), slurm(warm, pytester, 0, port, "-rs")
    text = leader.communicate(timeout=150)[0]
    assert leader.returncode == 1
    check_report(text, pytester.path / "artifacts" / "latest")
    assert follower.communicate(timeout=30)[0] == ""
    assert follower.returncode == 1


@pytest.mark.slow
def test_exit_first_ends_all(warm: WarmPython, pytester: pytest.Pytester) -> None:
    (pytester.path / "test_example.py").write_text(HEADER + SOURCE)
    port = free_port()
    follower, leader = slurm(warm, pytester, 1, port, "-x"), slurm(warm, pytester, 0, port, "-x")
    assert "1 failed, 3 passed" in leader.communicate(timeout=150)[0]
    follower.communicate(timeout=30)
    assert (leader.returncode, follower.returncode) == (1, 1)


@pytest.mark.slow
def test_a_process_with_other_tests_is_refused_with_the_difference(warm: WarmPython, pytester: pytest.Pytester) -> None:
    (pytester.path / "test_example.py").write_text(HEADER + SOURCE)
    port = free_port()
    follower = slurm(warm, pytester, 1, port, "--deselect=test_example.py::test_after")
    leader = slurm(warm, pytester, 0, port)
    text = leader.communicate(timeout=100)[0]
    follower.communicate(timeout=30)
    assert (leader.returncode, follower.returncode) == (pytest.ExitCode.USAGE_ERROR,) * 2
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
    port = free_port()
    follower, leader = slurm(warm, pytester, 1, port), slurm(warm, pytester, 0, port)
    text = leader.communicate(timeout=100)[0]
    follower.communicate(timeout=30)
    assert follower.returncode == -signal.SIGKILL
    assert leader.returncode == 1
    assert "CRASH: rank 1 of 2, rank_died" in text
    later = [v for name, v in read_verdicts(pytester.path).items() if name.startswith("test_later")]
    assert [v.cause for v in later] == ["unknown"] * 2  # not waited for again
    assert all("rank 1's process was lost in test_example.py::test_loses_a_node" in v.reason for v in later)


def test_what_a_process_waits_for_is_printed(warm: WarmPython, pytester: pytest.Pytester) -> None:
    (pytester.path / "test_example.py").write_text(HEADER + "@world_size(2)\ndef test_it(group): pass\n")
    leader = slurm(warm, pytester, 0, free_port())
    assert leader.stdout is not None
    found = next((line for line in leader.stdout if "waits for rank 1's process to collect its tests" in line), "")
    leader.kill()
    leader.communicate(timeout=30)
    assert found


def test_xdist_under_a_launcher_is_refused(warm: WarmPython, pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it(): pass")
    process = slurm(warm, pytester, 0, free_port(), "-n2")
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
