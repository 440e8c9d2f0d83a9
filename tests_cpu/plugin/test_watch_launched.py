"""``pytest-nsa watch`` on jobs that were started without our tracer: by dumps of torch's recorder, logs, and /proc."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_nsa.cli.main import main
from pytest_nsa.cli.watch import LaunchedWatcher
from pytest_nsa.observe.finders import launched_ranks
from pytest_nsa.observe.second_look import find_py_spy
from tests_cpu.foreign.cases import watchdog
from tests_cpu.plugin.sessions import wait_for
from tests_cpu.sockets import free_port

TRAINING = """
import os, sys, threading, time
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist

fault, prefix = sys.argv[1], os.environ["TORCH_FR_DUMP_TEMP_FILE"]
dist.init_process_group("gloo", timeout=timedelta(seconds=600))
rank, last_step = dist.get_rank(), time.monotonic()

def guard():
    while time.monotonic() - last_step < 2.0:
        time.sleep(0.3)
    dump()

def dump():
    Path(f"{prefix}{rank}").write_bytes(torch._C._distributed_c10d._dump_fr_trace())

def gather(value):
    parts = [torch.empty(4) for _ in range(2)]
    dist.all_gather(parts, value)

# Of the healthy job, the last dump shows rank 0 in a call, and rank 1 at work: there a second thread would wait long for the GIL.
if fault == "skips" or rank == 0: threading.Thread(target=guard, daemon=True).start()
for step in range(24):
    dist.all_reduce(torch.ones(7))
    if fault == "skips" and step == 5 and rank == 1:
        print("no gather", flush=True)
    else:
        gather(torch.ones(4))
    if fault == "none": dump()
    end = time.monotonic() + (6.0 if step == 12 and rank == 1 else 0.05)
    while time.monotonic() < end: sum(range(1000))
    last_step = time.monotonic()
dist.destroy_process_group()
os._exit(0)
"""
# Waits as a rank of another program, with a line on its output.
WAITS = "import sys, time; print(sys.argv[1], flush=True); time.sleep(1000)"
DIFFERENT_CALLS = ("skipped_collective", "collective_mismatch")
Start = Callable[..., list["subprocess.Popen[bytes]"]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Yield a function that starts a program on ranks with a launcher's variables, the output of each in a file."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(program: str, texts: list[str], mode: str = "wb", **variables: str) -> list[subprocess.Popen[bytes]]:
        job = {"WORLD_SIZE": str(len(texts)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        env = {**os.environ, **job, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "HOME": str(tmp_path), **variables}
        for rank, text in enumerate(texts):
            with (tmp_path / f"out_{rank}.txt").open(mode) as output:
                started.append(subprocess.Popen(
                    [sys.executable, "-c", program, text], env={**env, "RANK": str(rank)}, cwd=tmp_path, stdout=output,
                    stderr=output,
                ))  # fmt: skip
        return started

    yield begin
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def train(start: Start, tmp_path: Path) -> Callable[[str], list[subprocess.Popen[bytes]]]:
    """Return a function that starts the training on two ranks, with a recorder and a guard that dumps it."""
    return lambda fault: start(
        TRAINING, [fault] * 2, TORCH_FR_BUFFER_SIZE="200", TORCH_FR_DUMP_TEMP_FILE=f"{tmp_path}/dump_", OMP_NUM_THREADS="1"
    )  # fmt: skip


def follow(pid: int, until: Callable[[LaunchedWatcher], bool], *, shows_all: bool = False) -> LaunchedWatcher:
    """Return the watcher of a job once a condition is true of it. ``shows_all``: it shows what --once does."""
    watcher = LaunchedWatcher(launched_ranks(pid), pid)
    watcher.shows_all = shows_all
    look_until(watcher, until)
    return watcher


def look_until(watcher: LaunchedWatcher, until: Callable[[LaunchedWatcher], object]) -> None:
    """Look again and again until a condition is true of a watcher."""

    def has_come() -> object:
        watcher.look()  # what it returns, whether the report has changed, ends no wait
        return until(watcher)

    wait_for(has_come, limit_s=100)


def wait_for_file(path: Path, size: int = 1) -> None:
    """Wait until a process has written a file, of so many bytes at least."""
    wait_for(lambda: path.exists() and path.stat().st_size >= size)


def test_a_rank_that_skips_a_call_is_named_by_the_dumps_of_a_job(
    train: Callable[[str], list[subprocess.Popen[bytes]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = train("skips")
    wait_for_file(tmp_path / "dump_1")
    watcher = follow(ranks[0].pid, lambda watcher: watcher.finding is not None, shows_all=True)
    assert watcher.finding.cause in DIFFERENT_CALLS
    assert watcher.finding.ranks == (1,)
    assert not watcher.finding.certain
    assert "gather" in watcher.finding.reason
    assert any("2 flight recorder dumps" in line for line in watcher.lines())
    watcher.close()
    assert main(["watch", str(ranks[1].pid), "--once", "--json"]) == 1
    seen = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(r["rank"], r["pid"]) for r in seen["ranks"]] == [(rank, of.pid) for rank, of in enumerate(ranks)]
    assert seen["verdict"]["cause"] in DIFFERENT_CALLS
    assert seen["verdict"]["ranks"] == [1]
    assert all(of.poll() is None for of in ranks), "no rank was signalled"


def test_a_healthy_job_that_dumps_and_computes_is_not_announced(
    train: Callable[[str], list[subprocess.Popen[bytes]]], tmp_path: Path
) -> None:
    ranks = train("none")
    wait_for_file(tmp_path / "dump_1")

    def is_over(watcher: LaunchedWatcher) -> bool:
        assert watcher.finding is None, watcher.lines()
        return watcher.is_over

    watcher = follow(ranks[0].pid, is_over, shows_all=True)
    assert [of.wait() for of in ranks] == [0, 0]
    assert {board.phase for board in watcher.boards.values()} == {"done"}
    watcher.close()


def test_a_job_with_nothing_to_read_is_told_what_to_set(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = start(WAITS, ["a line", "a line"])
    wait_for_file(tmp_path / "out_1.txt")
    assert main(["watch", str(ranks[0].pid), "--once"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:4] for line in lines[:2]] == [
        ["rank", str(r), "pid", str(of.pid)] for r, of in enumerate(ranks)
    ]
    if find_py_spy() is None:
        assert len(lines) == 3
        assert "TORCH_FR_DUMP_TEMP_FILE" in lines[2]
        assert "NSA_TRACE_DIR" in lines[2]
    else:
        assert all("sleep" in line or " at " in line for line in lines[:2])


@pytest.mark.slow
def test_what_an_earlier_job_left_is_not_read(start: Start, tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / f"out_{rank}.txt").write_text(watchdog(rank, 5, "ALLREDUCE", 8 + rank))
        (tmp_path / f"dump_{rank}").write_text(json.dumps({"entries": [], "pg_status": {}}))
        os.utime(tmp_path / f"dump_{rank}", (0, 0))
    os.mkfifo(tmp_path / "ask_1.pipe")
    names = {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "dump_", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": "ask_"}
    ranks = start(WAITS, ["begins", "begins"], "ab", **names)
    wait_for_file(tmp_path / "out_1.txt", len(watchdog(1, 5, "ALLREDUCE", 9)) + 1)
    watcher = follow(ranks[1].pid, lambda watcher: watcher.observer.watch.stalled_s > 4.0)
    assert not [kind for kind in watcher.job.found.kinds if "stacks" not in kind]
    assert any(str(tmp_path / "ask_1.pipe") in line for line in watcher.lines())
    with (tmp_path / "out_1.txt").open("a") as log:
        log.write(watchdog(1, 7, "ALLREDUCE", 9))
    look_until(watcher, lambda watcher: watcher.job.has_stated_its_end())
    assert [call.number for call in watcher.job.found.ranks[1].calls] == [7]
    (tmp_path / "dump_0").write_text("{")
    look_until(watcher, lambda watcher: watcher.job.found.unread)
    assert any(str(tmp_path / "dump_0") in line for line in watcher.lines())
    watcher.close()


LAUNCHER = """
for rank in 0 1; do RANK=$rank WORLD_SIZE=2 {python} -c "{waits}" begins & done
echo $! > started; wait; sleep 1
printf '  rank      : 1 (local_rank: 1)\\n  exitcode  : -11 (pid: 7)\\n'
"""


def test_what_a_launcher_states_after_its_ranks_have_ended_is_read(tmp_path: Path) -> None:
    script = LAUNCHER.format(python=sys.executable, waits=WAITS)
    with (tmp_path / "log.txt").open("wb") as output:
        launcher = subprocess.Popen(["bash", "-c", script], cwd=tmp_path, stdout=output)
    wait_for_file(tmp_path / "started")
    wait_for(lambda: len(launched_ranks(launcher.pid)) == 2)
    ranks = launched_ranks(launcher.pid)
    watcher = LaunchedWatcher(ranks, launcher.pid)
    watcher.look()
    for pid in ranks.values():
        os.kill(pid, 9)
    look_until(watcher, lambda watcher: watcher.is_over)
    assert (watcher.finding.cause, watcher.finding.ranks) == ("rank_died", (1,))
    watcher.close()
    launcher.wait()


FORKS = """
import os, time
import torch
parent = os.getpid()
for _ in range(2):
    if os.getpid() == parent:
        os.fork()
os.write(1, b"%d\\n" % os.getpid())
time.sleep(1000)
"""


def test_ranks_without_variables_are_the_processes_that_one_with_torch_started(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "SLURM_PROCID", "PMI_RANK")}
    parent = subprocess.Popen([sys.executable, "-c", FORKS], env=env, stdout=subprocess.PIPE, text=True)
    pids = {int(parent.stdout.readline()) for _ in range(3)}
    try:
        found = launched_ranks(parent.pid)
        assert sorted(found) == [0, 1]
        assert {*found.values()} == pids - {parent.pid}
        assert launched_ranks(found[1]) == found
    finally:
        for pid in pids:
            os.kill(pid, 9)
        parent.communicate()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start another user's process")
def test_another_users_process_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    other = subprocess.Popen(["sleep", "1000"], user=65534, env={"RANK": "0", "WORLD_SIZE": "1"})
    assert launched_ranks(other.pid) == {}
    assert main(["watch", str(other.pid)]) == 2
    assert "another user" in capsys.readouterr().err
    other.kill()
    other.wait()
