"""NSA_TRACE_DIR in processes that a test starts: they are ranks by their launcher's number, or by the group that they form."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests_cpu.sockets import free_port
from tests_cpu.warm import WarmPython

WORKER = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
print("told", flush=True)
sys.stdin.read()
os._exit(0)
"""
SPAWN = """
import os
import torch, torch.distributed as dist, torch.multiprocessing as mp

def worker(rank, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    dist.all_reduce(torch.ones(3))
    dist.destroy_process_group()

def test_spawns():
    mp.spawn(worker, args=(int(os.environ["PORT"]),), nprocs=2)
"""
SCRIPT = """
import os, subprocess, sys

def test_starts_a_script():
    numbers = [{"RANK": str(rank), "WORLD_SIZE": "2"} for rank in range(2)]
    command = [sys.executable, "worker.py"]
    ranks = [subprocess.Popen(command, env={**os.environ, **n}, stdin=subprocess.DEVNULL) for n in numbers]
    assert [rank.wait() for rank in ranks] == [0, 0]
"""


def environment(folder: Path) -> dict[str, str]:
    port = str(free_port())
    mine = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "NSA_", "RANK", "WORLD_SIZE"))}
    return {**mine, "NSA_TRACE_DIR": str(folder / "run"), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PORT": port}


SLOW_SCRIPT = pytest.param(SCRIPT, id="subprocess", marks=pytest.mark.slow)


@pytest.mark.parametrize("source", [pytest.param(SPAWN, id="mp.spawn"), SLOW_SCRIPT])
def test_ranks_that_a_test_starts_leave_evidence(warm: WarmPython, tmp_path: Path, source: str) -> None:
    (tmp_path / "test_it.py").write_text(source)
    (tmp_path / "worker.py").write_text(WORKER)
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
    done = warm.call(*command, cwd=tmp_path, env=environment(tmp_path), nursery=True)
    assert done.returncode == 0, done.stdout
    for rank in range(2):
        assert (tmp_path / "run" / f"rank{rank}" / "board.bin").is_file()
        events = (tmp_path / "run" / f"rank{rank}" / "events.jsonl").read_text().splitlines()
        assert json.loads(events[0])["event"] == "start"
    assert json.loads((tmp_path / "run" / "job.json").read_text())["world_size"] == 2
