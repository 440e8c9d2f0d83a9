"""What `ranks_descendants` costs: tests that start nothing, tests that start a process, and ranks that a test starts.

    python benchmarks/descendants.py --json benchmarks/results/descendants.json

Each row runs one suite with `--ranks-descendants=off` and with `report`, in turns. CPU seconds are those of pytest and all its
children, without the program that announces, which is a child of init; of them the median over the rounds is kept. The size of what
two ranks have left is taken before it is deleted. Time to the verdict is from a test's time limit to its report.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from figures import keep, parser_of

PLAIN = "import pytest\n\n@pytest.mark.parametrize('n', range(1000))\ndef test_plain(n):\n    assert n >= 0\n"
STARTS = """
import subprocess
import pytest

@pytest.mark.parametrize("n", range(60))
def test_starts(n):
    subprocess.run(["/bin/true"], check=True)
"""
RANKS = """
import os, socket
import pytest, torch, torch.distributed as dist, torch.multiprocessing as mp

def worker(rank, port):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    for _ in range(200):
        dist.all_reduce(torch.ones(16))
    dist.barrier()
    dist.destroy_process_group()

@pytest.mark.parametrize("n", range(4))
def test_spawns(n):
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    mp.spawn(worker, args=(port,), nprocs=2)
    folder = os.environ.get("NSA_TRACE_JOBS", "")
    if folder:
        sizes = [os.path.getsize(os.path.join(top, f)) for top, _, files in os.walk(folder) for f in files]
        open("bytes", "w").write(str(sum(sizes) // 2))
"""
HANGS = """
import os, signal, socket, time
import torch, torch.distributed as dist, torch.multiprocessing as mp

def worker(rank, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    open(f"here{rank}", "w").close()
    if rank:
        dist.all_reduce(torch.ones(4))
    dist.barrier()

def test_hangs():
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    context = mp.spawn(worker, args=(port,), nprocs=2, join=False)
    while not all(map(os.path.exists, ("here0", "here1"))):
        time.sleep(0.05)
    signal.setitimer(signal.ITIMER_REAL, 3)
    open("limit", "w").write(str(time.time() + 3))
    while not context.join():
        pass
"""
CONFTEST = """
import time

def pytest_runtest_logreport(report):
    if report.failed:
        began = float(open("limit").read())
        open("verdict", "w").write(str(time.time() - began))
"""


def run(folder: Path, source: str, mode: str) -> float:
    """Return the CPU seconds of a suite."""
    (folder / "test_it.py").write_text(source)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    plugins = ["-p", "no:cacheprovider", "-p", "no:randomly"]
    options = [f"--ranks-descendants={mode}", "--timeout=300", "--ranks-artifacts=artifacts"]
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugins, *options], cwd=folder, stdout=subprocess.DEVNULL, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def paired(source: str, rounds: int, per: int) -> dict[str, Any]:
    """Return the medians of both modes, and the difference for one of ``per`` tests or ranks."""
    cpu: dict[str, list[float]] = {"off": [], "report": []}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(rounds):
            for mode in cpu if turn % 2 else reversed(cpu):
                cpu[mode].append(run(Path(folder), source, mode))
        size = Path(folder, "bytes")
        left = int(size.read_text()) if size.exists() else 0
    differences = [(b - a) / per for a, b in zip(cpu["off"], cpu["report"], strict=True)]
    found = {f"cpu_s_{mode}": round(statistics.median(values), 3) for mode, values in cpu.items()}
    found["ms_more_for_one"] = round(1e3 * statistics.median(differences), 3)
    found["ms_more_for_one_by_round"] = [round(1e3 * value, 3) for value in differences]
    return {**found, "evidence_bytes_a_rank": left} if left else found


def times_to_verdict(rounds: int) -> list[float]:
    """Return the seconds from a test's limit to its report."""
    found = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "conftest.py").write_text(CONFTEST)
            run(Path(folder), HANGS, "report")
            found.append(round(float(Path(folder, "verdict").read_text()), 2))
    return found


def main() -> None:
    """Read the command line, run, print, keep."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    figures = {
        "plain_test": paired(PLAIN, arguments.rounds, 1000),
        "test_that_starts_a_process": paired(STARTS, arguments.rounds, 60),
        "rank_that_a_test_starts": paired(RANKS, max(3, arguments.rounds // 2), 8),
        "limit_to_verdict_s": times_to_verdict(3),
    }
    keep(figures, arguments.json)


if __name__ == "__main__":
    main()
