"""NSA_TRACE_DIR: which processes leave evidence, how their ends are known, and what costs no training."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_nsa.diagnosis.engine import diagnose
from pytest_nsa.diagnosis.verdict import Verdict
from pytest_nsa.evidence.load import load
from tests_cpu.sockets import free_port
from tests_cpu.warm import WarmPython

ALONE = """
import os, subprocess, sys
import torch, torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
"""
JOB = """
import os, sys
import torch, torch.distributed as dist, torch.multiprocessing as mp

def train(rank, raises):
    dist.init_process_group("gloo", rank=rank, world_size=2)
    dist.all_reduce(torch.ones(1))
    if raises and rank == 1:
        raise ValueError("planted")
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.start_processes(train, (len(sys.argv) > 2,), nprocs=2, start_method=sys.argv[1])
"""

WORKER = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
os._exit(0)
"""
TEST_SPAWNS = """
import os
import torch, torch.distributed as dist, torch.multiprocessing as mp

def worker(rank, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    dist.all_reduce(torch.ones(3))
    dist.destroy_process_group()

def test_spawns():
    mp.spawn(worker, args=(int(os.environ["PORT"]),), nprocs=2)
"""
TEST_STARTS = """
import os, subprocess, sys

def test_starts_a_script():
    numbers = [{"RANK": str(rank), "WORLD_SIZE": "2"} for rank in range(2)]
    command = [sys.executable, "worker.py"]
    ranks = [subprocess.Popen(command, env={**os.environ, **n}, stdin=subprocess.DEVNULL) for n in numbers]
    assert [rank.wait() for rank in ranks] == [0, 0]
"""


def start(folder: Path, source: str, *arguments: str, rank: int | None = 0, size: int = 1, port: int = 0, run: str = "run"
          ) -> subprocess.Popen[str]:  # fmt: skip
    """Start a script with the variables of a launcher, unless ``rank`` is None."""
    (folder / "script.py").write_text(source)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port or free_port())}
    launched = {} if rank is None else {"RANK": str(rank), "WORLD_SIZE": str(size)}
    return subprocess.Popen(
        [sys.executable, str(folder / "script.py"), *arguments], cwd=folder, stderr=subprocess.PIPE, text=True,
        env={**os.environ, **place, **launched, "NSA_TRACE_DIR": str(folder / run)},
    )  # fmt: skip


def verdict_of(folder: Path, run: str = "run") -> Verdict:
    return diagnose(load(folder / run))


@pytest.mark.parametrize(
    ("end", "found"),
    [
        ("sys.exit(3)", ("FAIL", "rank_exited")),
        ("os._exit(7)", ("FAIL", "rank_exited")),
        ("os._exit(0)", ("PASS", "")),
        ("try:\n    sys.exit(3)\nexcept SystemExit:\n    dist.all_reduce(torch.ones(1))", ("PASS", "")),
    ],
)
def test_an_exit_s_status_is_known(tmp_path: Path, end: str, found: tuple[str, str]) -> None:
    process = start(tmp_path, ALONE + end)
    process.communicate(timeout=100)
    verdict = verdict_of(tmp_path)
    assert (verdict.outcome, verdict.cause) == found
    if verdict.failed:
        assert verdict.where.endswith("script.py:7 in <module>")


@pytest.mark.parametrize(
    ("method", "raises"),
    [
        ("fork", False),
        ("spawn", True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("fork", True), ("spawn", False), ("forkserver", True))
        ),
    ],
)
def test_children_of_multiprocessing_end_well_or_by_an_exception(tmp_path: Path, method: str, raises: bool) -> None:
    process = start(tmp_path, JOB, method, *(["raises"] if raises else []), rank=None)
    process.communicate(timeout=100)
    verdict = verdict_of(tmp_path)
    assert verdict.outcome == ("FAIL" if raises else "PASS")
    if raises:
        assert (verdict.cause, verdict.ranks) == ("rank_exception", (1,))


def test_a_rank_that_was_killed_is_named_where_the_launcher_ended_the_other(tmp_path: Path) -> None:
    source = (
        ALONE + "dist.barrier()\nif dist.get_rank() == 1:\n    os.kill(os.getpid(), 9)\nprint('here', flush=True)\n"
    )
    source += "import threading\nthreading.Event().wait()\n"
    port = free_port()
    ranks = [start(tmp_path, source, rank=rank, size=2, port=port) for rank in (0, 1)]
    ranks[1].wait(100)
    ranks[0].terminate()
    assert ranks[0].wait(100) == -signal.SIGTERM
    for process in ranks:
        process.communicate()
    verdict = verdict_of(tmp_path)
    assert (verdict.outcome, verdict.cause, verdict.ranks) == ("CRASH", "rank_died", (1,))


def test_a_job_that_a_rank_starts_leaves_its_evidence_alone(tmp_path: Path) -> None:
    inner = f"""
if len(sys.argv) == 1:
    subprocess.run([sys.executable, __file__, "inner"], env={{**os.environ, "MASTER_PORT": "{free_port()}"}}, check=True)
    raise ValueError("planted")
"""
    process = start(tmp_path, ALONE + inner)
    _, errors = process.communicate(timeout=100)
    assert f"process {process.pid} leaves its evidence there" in errors
    verdict = verdict_of(tmp_path)
    assert verdict.failed
    assert "ValueError: planted" in verdict.reason


def test_a_folder_that_cannot_be_made_costs_the_evidence_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    # Without it, torch itself may abort at exit: a thread of its group still runs.
    process = start(tmp_path, f"{ALONE}dist.destroy_process_group()\n", run="file/run")
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert "nsa: rank 0 leaves no evidence: " in errors


@pytest.mark.parametrize(
    "source", [TEST_SPAWNS, pytest.param(TEST_STARTS, marks=pytest.mark.slow)], ids=["mp.spawn", "subprocess"]
)
def test_ranks_that_a_test_starts_leave_evidence(warm: WarmPython, tmp_path: Path, source: str) -> None:
    (tmp_path / "test_it.py").write_text(source)
    (tmp_path / "worker.py").write_text(WORKER)
    port = str(free_port())
    mine = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "NSA_", "RANK", "WORLD_SIZE"))}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PORT": port, "NSA_TRACE_DIR": str(tmp_path / "run")}
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
    done = warm.call(*command, cwd=tmp_path, env={**mine, **place}, nursery=True)
    assert done.returncode == 0, done.stdout
    assert [rank.board is not None and rank.passed for rank in load(tmp_path / "run").ranks] == [True, True]
