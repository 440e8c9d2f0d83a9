"""`pytest-nsa watch PID` of a job that leaves no evidence: /proc, and py-spy where it is installed, show what there is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_nsa.cli.main import main
from pytest_nsa.cli.without_evidence import Unaided, as_dump, ranks_of
from pytest_nsa.evidence.stacks import parse_dump
from pytest_nsa.system import py_spy
from pytest_nsa.system.descendants import ticks_since_boot
from tests_cpu.sockets import free_port

WAITS = """
import os, sys, time

def save():
    time.sleep(1000)

open(sys.argv[1] + os.environ["RANK"], "w").close()
save()
"""
HANGS = """
import os, sys, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")

def save():
    time.sleep(1000)

open(sys.argv[1] + os.environ["RANK"], "w").close()
if dist.get_rank() == 1:
    save()
dist.all_reduce(torch.ones(1))
"""
SPAWNED = """
import os, sys
import torch, torch.distributed as dist, torch.multiprocessing as mp

def worker(rank):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[2])
    dist.init_process_group("gloo", rank=rank, world_size=3)
    open(sys.argv[1] + str(rank), "w").close()
    if rank != 1:
        dist.all_reduce(torch.ones(1))
    dist.barrier()

if __name__ == "__main__":
    mp.spawn(worker, nprocs=3)
"""


@pytest.fixture
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start two ranks of a program, each with the variables that a launcher sets, and wait until both are where they stall."""
    (tmp_path / "job.py").write_text(request.param)
    there = tmp_path / "there"
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(40000 + os.getpid() % 20000)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "job.py", str(there)], cwd=tmp_path, env={**os.environ, **variables, "RANK": str(rank)}
        )
        for rank in (0, 1)
    ]
    while not all(Path(f"{there}{rank}").exists() for rank in (0, 1)):
        assert all(rank.poll() is None for rank in ranks)
        time.sleep(0.02)
    yield ranks
    for rank in ranks:
        rank.kill()
        rank.wait()


@pytest.mark.parametrize("job", [WAITS], indirect=True)
def test_ranks_are_found_by_their_variables_and_shown_by_proc(
    job: list[subprocess.Popen[bytes]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)  # without py-spy
    assert ranks_of(job[1].pid) == {0: job[0].pid, 1: job[1].pid}
    assert main(["watch", str(job[1].pid), "--once"]) == 1
    out = capsys.readouterr().out
    assert f"rank 1  pid {job[1].pid}  still for" in out
    assert "py-spy is not installed: without it no stack is known" in out
    assert "by /proc and py-spy alone" in out
    other = subprocess.Popen(["sleep", "1000"])  # this process itself may have a board, of another test
    assert main(["watch", str(other.pid), "--once"]) == 2
    other.kill()
    other.wait()


@pytest.mark.skipif(py_spy.program() is None, reason="needs py-spy")
@pytest.mark.parametrize("job", [HANGS], indirect=True)
def test_the_rank_that_others_wait_for_is_named_with_its_line(
    job: list[subprocess.Popen[bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", str(job[0].pid), "--once"]) == 1
    out = capsys.readouterr().out
    assert "suspicion (56% sure): sleeping on rank 1 at" in out
    assert "job.py:8 in save: rank 1 sleeps; rank 0 waited for it" in out


# Without torch, which starts its children so, too.
CONNECTED = """
import multiprocessing, socket, sys, time

def worker(rank):
    connection = socket.create_connection(("127.0.0.1", int(sys.argv[2])))
    open(sys.argv[1] + str(rank), "w").close()
    time.sleep(1000)

if __name__ == "__main__":
    server = socket.create_server(("127.0.0.1", int(sys.argv[2])))
    spawn = multiprocessing.get_context("spawn")
    ranks = [spawn.Process(target=worker, args=(rank,)) for rank in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
"""


@pytest.fixture
def spawned(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[int]:
    """Start a program that spawns its ranks; yield its process id once all ranks are there."""
    (tmp_path / "job.py").write_text(request.param)
    there = tmp_path / "there"
    command = [sys.executable, "job.py", str(there), str(free_port())]
    program = subprocess.Popen(command, cwd=tmp_path, start_new_session=True)
    while not all(Path(f"{there}{rank}").exists() for rank in range(3)):
        assert program.poll() is None
        time.sleep(0.02)
    yield program.pid
    os.killpg(program.pid, signal.SIGKILL)
    program.wait()


@pytest.mark.parametrize("spawned", [CONNECTED, pytest.param(SPAWNED, marks=pytest.mark.slow)], indirect=True)
def test_children_of_mp_spawn_are_ranks_in_the_order_of_their_starts(spawned: int) -> None:
    ranks = ranks_of(spawned)
    assert list(ranks) == [0, 1, 2]
    assert ranks_of(ranks[2]) == ranks


@pytest.mark.skipif(py_spy.program() is None, reason="needs py-spy")
@pytest.mark.parametrize("spawned", [SPAWNED], indirect=True)
def test_the_rank_that_is_in_another_call_is_named_by_py_spy(spawned: int, capsys: pytest.CaptureFixture[str]) -> None:
    ranks = ranks_of(spawned)
    assert main(["watch", str(ranks[1]), "--once"]) == 1
    out = capsys.readouterr().out
    assert "collective_mismatch on rank 1 at" in out
    assert "of the ranks that wait, ranks 0 and 2 in all_reduce, rank 1 in barrier" in out
    assert "job.py:10 in worker" in out, "the user's line, not torch's"
    assert "\ndo: " in out


def test_py_spy_is_found_beside_an_interpreter_whose_environment_is_not_activated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "elsewhere"))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    assert py_spy.program() is None
    (tmp_path / "py-spy").touch(mode=0o755)
    assert py_spy.program() == str(tmp_path / "py-spy")


def test_stacks_of_py_spy_are_read_as_a_dump() -> None:
    """As py-spy 0.4 writes them; what is no thread is passed over."""
    frames = [
        {"name": "save", "filename": "/home/me/job.py", "line": 3},
        {"name": "Trainer.fit.<locals>.step", "filename": "/home/me/job.py", "line": 5},
        {"name": "<module>", "filename": "/home/me/job.py", "line": 8},
    ]
    threads = [
        {"thread_name": "MainThread", "thread_id": 7, "frames": frames},
        {"thread_name": "x", "frames": []},
        None,
    ]
    (stack,) = parse_dump(as_dump(threads))
    assert stack.is_main
    assert [frame.describe() for frame in stack.frames] == [
        "/home/me/job.py:3 in save",
        "/home/me/job.py:5 in step",
        "/home/me/job.py:8 in <module>",
    ]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can choose a process's number")
def test_a_process_that_has_the_number_of_one_that_ended_is_no_rank() -> None:
    first = subprocess.Popen(["sleep", "1000"])
    job = Unaided({0: first.pid}, 1)
    assert not job.is_over
    first.kill()
    first.wait()
    while ticks_since_boot() <= job._began[first.pid]:
        time.sleep(0.001)
    for _ in range(100):  # another process may begin meanwhile, and take it
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(first.pid - 1))
        other = subprocess.Popen(["sleep", "1000"])
        try:
            if other.pid == first.pid:
                assert job.is_over
                job.look()
                assert job.finding is None
                return
        finally:
            other.kill()
            other.wait()
    pytest.skip("the number was not given again")
