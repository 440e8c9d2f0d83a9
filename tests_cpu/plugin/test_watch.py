"""``pytest-nsa watch`` and ``diagnose`` on a training that pytest did not start: torchrun and one environment variable."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_nsa.cli.watch import Watcher
from tests_cpu.warm import WarmPython

TRAINING = """
import atexit, os, queue, signal, sys, threading, time
import torch, torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 1)))
for step in range(200):
    if step == 20 and rank == 1:
        fault = sys.argv[1]
        if fault == "sleeps": time.sleep(1000)
        if fault == "dies": os.kill(os.getpid(), signal.SIGKILL)
        if fault == "raises": raise ValueError("bad sample")
    if step == 20 and sys.argv[1] == "crossed": dist.recv(torch.ones(1), 1 - rank)
    model(torch.randn(4, 8)).sum().backward()
dist.destroy_process_group()
def consume(items): items.get()
if sys.argv[1] == "leaves a thread" and rank == 1:
    threading.Thread(target=consume, args=(queue.Queue(),)).start()
else:
    atexit._run_exitfuncs()
    os._exit(0)  # past C++'s destructors: torch 2.13 itself ends every fifth such program there by SIGABRT on a busy machine
"""


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "training.py").write_text(TRAINING)
    return tmp_path


@pytest.fixture
def start(warm: WarmPython, folder: Path) -> Iterator[object]:
    """Yield a function that starts torchrun on the training with a fault; end its processes with the test."""
    started = []

    def begin(fault: str) -> subprocess.Popen[str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "RANK", "WORLD_SIZE"))}
        with (folder / "output.txt").open("wb") as output:
            process = warm.popen(
                "-m", "torch.distributed.run", "--nproc_per_node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0",
                "training.py", fault,
                cwd=folder, env={**env, "NSA_TRACE_DIR": str(folder / "run"), "OMP_NUM_THREADS": "1"},
                stdout=output, stderr=output, start_new_session=True, nursery=True,
            )  # fmt: skip
        started.append(process)
        return process

    yield begin
    for process in started:
        pids = [int(p.name) for p in Path("/proc").glob("[0-9]*") if _is_in(p, folder)]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        process.wait()


def _is_in(process: Path, folder: Path) -> bool:
    try:
        return os.readlink(process / "cwd") == str(folder)
    except OSError:
        return False


@pytest.fixture
def run(warm: WarmPython, folder: Path) -> Run:
    """Return a function that runs the command in the training's folder."""
    return lambda *arguments: warm.call("-m", "pytest_nsa", *arguments, cwd=folder, timeout=60)


def wait_for_files(folder: Path, are_right: Callable[[list[Path]], bool]) -> None:
    """Wait until the files of the ranks' heartbeats are right."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if are_right(list((folder / "run").glob("heartbeat_rank*.jsonl"))):
            return
        time.sleep(0.1)
    raise AssertionError("the training did not come so far within 60 s")


def wait_for_steps(folder: Path, steps: int) -> None:
    """Wait until both ranks' heartbeats have recorded so many steps."""
    wait_for_files(folder, lambda files: len(files) == 2 and all(f'"step": {steps}' in f.read_text() for f in files))


def test_a_rank_that_stalls_is_named_while_it_runs(run: Run, folder: Path, start: object) -> None:
    start("sleeps")  # type: ignore[operator]
    wait_for_steps(folder, 20)
    done = run("watch", "--run", "run", "--once", "--json")
    seen = json.loads(done.stdout.splitlines()[-1])
    assert [r["rank"] for r in seen["ranks"]] == [0, 1]
    assert (seen["verdict"]["cause"], seen["verdict"]["ranks"]) == ("sleeping", [1])
    assert "training.py:12" in seen["verdict"]["where"]
    assert done.returncode == 1
    by_pid = run("watch", str(seen["ranks"][0]["pid"]), "--once")
    assert "suspicion: sleeping on rank 1 at " in by_pid.stdout
    assert "rank 0  step 21  backward" in by_pid.stdout
    assert "\ndo: " in by_pid.stdout
    watcher = Watcher(folder / "run")
    while watcher.finding is None:
        watcher.look()
        time.sleep(0.1)
    first, second = ([line.partition(":")[0] for line in watcher.lines(again=False)] for _ in range(2))
    assert first[-2:] == ["suspicion", "do"]
    assert not {"suspicion", "do"}.intersection(second), "a log has it once"
    told = run("diagnose", "run", "--json")
    verdict = json.loads(told.stdout)
    assert (verdict["outcome"], verdict["cause"], verdict["ranks"]) == ("HANG", "sleeping", [1])


def test_a_thread_that_a_program_left_is_named(folder: Path, start: object) -> None:
    start("leaves a thread")  # type: ignore[operator]
    wait_for_files(folder, lambda files: len(files) == 2)
    watcher, deadline = Watcher(folder / "run"), time.monotonic() + 60
    while watcher.finding is None and time.monotonic() < deadline:
        watcher.look()
        time.sleep(0.1)
    assert watcher.finding is not None
    assert (watcher.finding.cause, watcher.finding.ranks) == ("lock_deadlock", (1,))
    assert watcher.finding.where.endswith(" in consume")


def test_ranks_that_wait_for_each_other_are_asked_for_their_counters(folder: Path, start: object) -> None:
    start("crossed")  # type: ignore[operator]
    wait_for_steps(folder, 20)
    watcher = Watcher(folder / "run")
    while watcher.finding is None:
        watcher.look()
        time.sleep(0.1)
    assert (watcher.finding.cause, watcher.finding.ranks) == ("p2p_unmatched", (0, 1))
    assert watcher.finding.ends_the_test
    counted = [json.loads((folder / "run" / f"rank{rank}" / "counters.json").read_text())["frames"] for rank in (0, 1)]
    assert [frames[-1]["counters"] for frames in counted] == [{"step": 20}, {"step": 20}]


@pytest.mark.parametrize(
    ("fault", "cause"),
    [("raises", "rank_exception"), pytest.param("dies", "rank_died", marks=pytest.mark.slow)],
)
def test_what_ended_a_training_is_known_from_its_folder(
    run: Run, folder: Path, start: object, fault: str, cause: str
) -> None:
    process = start(fault)  # type: ignore[operator]
    watcher = run("watch", "--run", "run")
    process.wait()
    verdict = json.loads(run("diagnose", "run", "--json").stdout)
    assert (verdict["cause"], verdict["ranks"]) == (cause, [1]), watcher.stdout


def test_a_training_that_goes_well(run: Run, folder: Path, start: object) -> None:
    process = start("none")  # type: ignore[operator]
    done = run("watch", "--run", "run")
    assert process.wait() == 0, (folder / "output.txt").read_text()
    assert done.returncode == 0
    assert "done" in done.stdout
    assert json.loads(run("diagnose", "run", "--json").stdout)["outcome"] == "PASS"


def test_two_nodes_folders_are_one_run(run: Run, folder: Path, start: object) -> None:
    start("sleeps")  # type: ignore[operator]
    wait_for_steps(folder, 20)
    run("watch", "--run", "run", "--once")
    other = folder / "node1"
    other.mkdir()
    (folder / "run" / "rank1").rename(other / "rank1")
    verdict = json.loads(run("diagnose", "run", "node1", "--json").stdout)
    assert (verdict["cause"], verdict["ranks"]) == ("sleeping", [1])


def test_a_process_that_is_no_rank(run: Run) -> None:
    other = subprocess.Popen(["sleep", "100"])
    done = run("watch", str(other.pid))
    other.kill()
    other.wait()
    assert done.returncode == 2
    assert "is not a rank (no board, no RANK): start its training with NSA_TRACE_DIR=DIR" in done.stderr


def test_a_watch_that_begins_before_the_training_writes_into_its_folder(tmp_path: Path) -> None:
    """The folder of another user is not written into; one that is not there yet has no owner."""
    watcher = Watcher(tmp_path / "run")
    watcher.look()
    (tmp_path / "run").mkdir()
    assert watcher.observer.log == tmp_path / "run" / "host.jsonl"
