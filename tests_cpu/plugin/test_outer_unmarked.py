"""Suites of an outer launcher whose tests run on no ranks of ours: each process runs them, nothing that fails is hidden, and a test
past its limit ends though its main thread is in native code.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_nsa.testing import HEADER
from tests_cpu.plugin.sessions import run_under_torchrun
from tests_cpu.sockets import free_port
from tests_cpu.warm import WarmPython

# As Megatron-LM's suite: one group for a session, by env://, which ends behind a barrier.
CONFTEST = """
import pytest, torch, torch.distributed as dist

@pytest.fixture(scope="session")
def pg():
    dist.init_process_group("gloo")
    yield dist.group.WORLD
    dist.barrier()
    dist.destroy_process_group()
"""
RANK = 'RANK = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID")))\n'


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each suite ask for ranks before it is collected, as by a conftest.py that imports the plugin."""
    monkeypatch.setenv("PYTEST_ADDOPTS", "-o ranks_marks=true")


Torchrun = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def torchrun(warm: WarmPython, pytester: pytest.Pytester) -> Torchrun:
    """Return a function that runs pytest on two ranks of torchrun's."""
    return lambda *options: run_under_torchrun(warm, pytester.path, "--junitxml=junit.xml", *options)


def results(folder: Path) -> dict[str, dict[str, str]]:
    """Return what became of each test, by testsuite."""
    found: dict[str, dict[str, str]] = {}
    for suite in ET.parse(folder / "junit.xml").getroot():
        cases = {case.get("name", ""): "passed" for case in suite.iter("testcase")}
        cases |= {
            case.get("name", ""): part.tag
            for case in suite.iter("testcase")
            for part in case
            if part.tag in ("failure", "error")
        }
        found[suite.get("name", "")] = cases
    return found


def write(pytester: pytest.Pytester, source: str) -> None:
    (pytester.path / "conftest.py").write_text(CONFTEST)
    (pytester.path / "test_example.py").write_text(HEADER + RANK + source)


def test_what_fails_on_rank_1_alone_is_shown(torchrun: Torchrun, pytester: pytest.Pytester) -> None:
    write(
        pytester,
        """
def test_shard(): assert RANK < 1, "wrong shard on this rank"

def test_other(): pass
""",
    )
    done = torchrun()
    assert done.returncode == 1
    assert "AssertionError: wrong shard on this rank" in done.stdout
    assert "1 failed, 1 passed" in done.stdout
    assert results(pytester.path) == {
        "pytest": {"test_shard": "passed", "test_other": "passed"},
        "pytest rank 1": {"test_shard": "failure", "test_other": "passed"},
    }
    assert not (pytester.path / "artifacts").exists()


MIXED = """
def test_all_reduce(pg):
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == 2

def test_shard():
    print("a word of rank", RANK)
    assert RANK < 1, "wrong shard on this rank"

@world_size(2)
def test_marked(group): dist.barrier()
"""


def test_beside_a_marked_test_the_others_run_in_every_process(torchrun: Torchrun, pytester: pytest.Pytester) -> None:
    write(pytester, MIXED)
    done = torchrun("--timeout=60")
    assert done.returncode == 1
    # Rank 0's process reports, and rank 1's what fails in it alone.
    assert done.stdout.count("test session starts") == 1
    assert "[rank 1] FAILED test_example.py::test_shard" in done.stdout
    assert "[rank 1] E       AssertionError: wrong shard on this rank" in done.stdout
    assert "[rank 1] a word of rank 1" in done.stdout
    assert "[rank 1] 1 failed here, of 3" in done.stdout
    assert "3 passed" in done.stdout
    assert results(pytester.path) == {
        "pytest": {"test_all_reduce": "passed", "test_shard": "passed", "test_marked": "passed"},
        "pytest rank 1": {"test_all_reduce": "passed", "test_shard": "failure"},
    }


def test_a_test_past_its_limit_ends_with_rank_line_and_cause(torchrun: Torchrun, pytester: pytest.Pytester) -> None:
    write(
        pytester,
        """
def test_first(pg): dist.barrier()

def test_loss(pg):
    loss = torch.tensor([1.0 + RANK])
    assert loss.item() < 1.5, "loss differs"  # of rank 1; rank 0 waits in native code
    dist.all_reduce(loss)

def test_next(pg): dist.barrier()
""",
    )
    done = torchrun("--timeout=8")
    assert done.returncode == 1
    line = (HEADER + RANK).count("\n") + 6
    # Rank 1 is in the next test, with a limit that is over in the same moment: either clock may be the first.
    verdict = re.escape(f"FAIL: rank 1 of 2, rank_exception, at test_example.py:{line} in test_loss")
    assert re.search(rf"^\[rank [01]\] {verdict}", done.stdout, re.M), done.stdout
    ended = r"ended (at its time limit of 8 s|with the others)"
    assert re.search(rf"^\[rank 0\] HANG test_example.py::test_loss: {ended}", done.stdout, re.M), done.stdout
    assert "[rank 1] E       AssertionError: loss differs" in done.stdout
    assert "exitcode  : 1" in done.stdout
    assert results(pytester.path) == {
        "pytest": {"test_first": "passed", "test_loss": "failure"},
        "pytest rank 1": {"test_first": "passed", "test_loss": "failure", "test_next": "failure"},
    }
    run = pytester.path / "artifacts" / "latest"
    assert "rank_exception" in (run / "SUMMARY.md").read_text()
    assert (run / "report.html").is_file()


def test_a_rank_that_hangs_when_the_other_is_done_is_ended(torchrun: Torchrun, pytester: pytest.Pytester) -> None:
    write(
        pytester,
        """
import ctypes

def test_native():
    mutex, lock = (ctypes.c_char * 64)(), ctypes.CDLL(None).pthread_mutex_lock
    for _ in range(1 + RANK):
        lock(mutex)  # no signal interrupts the second call
""",
    )
    done = torchrun("--timeout=3")
    assert done.returncode == 1
    assert "[rank 1] HANG test_example.py::test_native: ended at its time limit of 3 s" in done.stdout
    assert results(pytester.path) == {"pytest": {"test_native": "passed"}, "pytest rank 1": {"test_native": "failure"}}


@pytest.mark.slow
def test_a_process_that_dies_leaves_what_it_had_reported(torchrun: Torchrun, pytester: pytest.Pytester) -> None:
    write(
        pytester,
        """
def test_first(): assert RANK == 1, "a failure before"

def test_dies():
    if RANK == 0:
        os.kill(os.getpid(), signal.SIGKILL)
""",
    )
    done = torchrun()
    assert done.returncode == 1
    assert "[rank 0] FAILED test_example.py::test_first" in done.stdout
    assert "AssertionError: a failure before" in done.stdout
    assert "[rank 0] CRASH test_example.py::test_dies: its process has ended" in done.stdout
    assert results(pytester.path)["pytest"] == {"test_first": "failure", "test_dies": "failure"}


@pytest.mark.slow
def test_a_group_by_env_shares_the_port_with_ours_where_no_launcher_keeps_a_store(pytester: pytest.Pytester) -> None:
    """SLURM starts no store: rank 0's process serves both on MASTER_PORT."""
    write(pytester, MIXED.replace("RANK < 1", "True"))
    ranks = []
    port = str(free_port())
    for rank in range(2):
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:randomly", "--timeout=60"]
        ranks.append(
            subprocess.Popen(
                command, cwd=pytester.path, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        )
    texts = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], texts
    assert "3 passed" in texts[0]
