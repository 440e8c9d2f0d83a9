"""ranks_descendants: tests on no ranks that start ranks by themselves, at their time limit, at Ctrl-C, at the session's end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests_cpu.sockets import free_port
from tests_cpu.warm import WarmPython

# Each child says that it is in place; then the test's time limit comes, whatever time the machine took until there.
COMMON = """
import os, signal, subprocess, sys, time
from pathlib import Path

def here(name):
    Path(name).touch()
    Path("pids", str(os.getpid())).touch()

def at_limit(*names):
    while not all(map(os.path.exists, names)):
        time.sleep(0.02)
    signal.setitimer(signal.ITIMER_REAL, 2)
"""
WORKERS = """
import torch, torch.distributed as dist

def worker(rank, world, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    for step in range(3):
        if step == 2:
            here(f"rank{rank}")
        if not (step == 2 and rank == 1):
            dist.all_reduce(torch.ones(4))  # HERE
        dist.barrier()
"""
SPAWN = """
from common import *
from workers import worker
import torch.multiprocessing as mp

def test_spawns():
    context = mp.spawn(worker, args=(2, int(os.environ["PORT"])), nprocs=2, join=False)
    at_limit("rank0", "rank1")
    while not context.join():
        pass

def test_after():
    assert "NSA_TRACE_HOST" not in os.environ
"""
FORK = """
from common import *
import multiprocessing

def test_forks():
    subprocess.run(["true"], check=True)
    from workers import worker  # torch is imported after the first process has started
    mp = multiprocessing.get_context("fork")
    ranks = [mp.Process(target=worker, args=(r, 2, int(os.environ["PORT"])), daemon=True) for r in range(2)]
    for rank in ranks:
        rank.start()
    at_limit("rank0", "rank1")
    for rank in ranks:
        rank.join()
"""
# An environment made anew, as launchers of engines do.
SCRIPT = """
from common import *

def test_runs_a_script():
    keeps = {n: os.environ[n] for n in ("PATH", "PYTHONPATH", "HOME") if n in os.environ}
    make = lambda rank: {**keeps, "RANK": str(rank), "WORLD_SIZE": "2", "PORT": os.environ["PORT"]}
    command = [sys.executable, "script.py"]
    ranks = [subprocess.Popen(command, env=make(rank), start_new_session=True) for rank in range(2)]
    at_limit("rank0", "rank1")
    for rank in ranks:
        rank.wait()
"""
RAISES = """
from common import *

def test_runs_torchrun():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "raises.py"]
    done = subprocess.run(command, capture_output=True)
    assert done.returncode == 0
"""
RAISES_SCRIPT = """
import atexit, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
out = torch.ones(3)
if dist.get_rank() == 1:
    atexit.register(time.sleep, 1)
    atexit.register(dist.destroy_process_group)  # rank 0 raises, too, before torchrun sees that this one has ended
    assert out.sum().item() == 4.0, "beyond tolerance"  # HERE
dist.barrier()
"""
EXIT = """
from common import *
from workers import worker
import torch.multiprocessing as mp

def test_passes():
    mp.spawn(worker, args=(2, int(os.environ["PORT"])), nprocs=2, join=False)
    while not os.path.exists("rank1"):
        time.sleep(0.02)
"""
LEAVES = """
from common import *

def test_leaves():
    subprocess.run([sys.executable, "-c", "import os, time\\nif os.fork(): os._exit(0)\\n"
        "open('pids/' + str(os.getpid()), 'w').close()\\nwhile True: time.sleep(1)"])
    while not os.listdir("pids"):
        time.sleep(0.02)
"""
# Two ranks that serve a session: rank 0 waits for a request, rank 1 in a broadcast of it.
SERVER = """
from common import *
import pytest

@pytest.fixture(scope="session")
def server():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "server.py"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    yield process
    Path("stop").touch()
    assert process.wait() == 0

def test_asks(server):
    while not all(map(os.path.exists, ("rank0", "rank1"))):
        time.sleep(0.02)

def test_hangs(server):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1e6)"])
    Path("pids", str(child.pid)).touch()
    signal.setitimer(signal.ITIMER_REAL, 1)
    child.wait()

def test_still_serves(server):
    assert server.poll() is None
"""
SERVER_SCRIPT = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
open(f"rank{dist.get_rank()}", "w").close()
if dist.get_rank() == 0:
    while not os.path.exists("stop"):
        time.sleep(0.05)
dist.broadcast(torch.ones(1), 0)
dist.destroy_process_group()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pids").mkdir()
    (tmp_path / "common.py").write_text(COMMON)
    (tmp_path / "workers.py").write_text("from common import here\n" + WORKERS)
    (tmp_path / "script.py").write_text(
        'import os\nfrom workers import worker\nworker(int(os.environ["RANK"]), 2, int(os.environ["PORT"]))\n'
    )
    (tmp_path / "raises.py").write_text(RAISES_SCRIPT)
    (tmp_path / "server.py").write_text(SERVER_SCRIPT)
    return tmp_path


def command(*arguments: str, mode: str = "report") -> list[str]:
    plugins = ["-p", "no:cacheprovider", "-p", "no:randomly"]
    return [
        sys.executable, "-m", "pytest", "-q", *plugins, "--timeout=600", f"--ranks-descendants={mode}",
        "--ranks-artifacts=artifacts", "--junitxml=junit.xml", *arguments,
    ]  # fmt: skip


def environment() -> dict[str, str]:
    mine = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "NSA_", "RANK", "WORLD_SIZE"))}
    return {**mine, "PORT": str(free_port()), "PYTHONPATH": os.getcwd()}


def run(
    warm: WarmPython, folder: Path, source: str, *arguments: str, mode: str = "report", nursery: bool = True
) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(source)
    line = command(*arguments, mode=mode)[1:]
    return warm.call(*line, cwd=folder, env=environment(), stderr=subprocess.STDOUT, timeout=170, nursery=nursery)


def verdict(folder: Path) -> dict[str, object]:
    (line,) = (folder / "artifacts" / "latest" / "verdicts.jsonl").read_text().splitlines()
    found: dict[str, object] = json.loads(line)
    return found


def line_of(source: str, marker: str) -> int:
    return next(i for i, line in enumerate(source.splitlines(), 1) if marker in line)


def alive(folder: Path) -> list[int]:
    """Return the children that still run."""
    return [
        int(p.name) for p in (folder / "pids").iterdir() if Path("/proc", p.name).exists() and not _is_zombie(p.name)
    ]


def _is_zombie(pid: str) -> bool:
    return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize(
    ("source", "passed"),
    [
        pytest.param(SPAWN, 1, id="mp.spawn"),
        pytest.param(FORK, 0, id="fork", marks=pytest.mark.slow),
        pytest.param(SCRIPT, 0, id="an environment of the test's", marks=pytest.mark.slow),
    ],
)
def test_a_test_at_its_limit_names_the_rank_and_ends_its_processes(
    warm: WarmPython, folder: Path, source: str, passed: int
) -> None:
    done = run(warm, folder, source)
    found = verdict(folder)
    assert (found["cause"], found["ranks"]) == ("skipped_collective", [1]), done.stdout
    assert f"workers.py:{line_of(WORKERS, 'HERE') + 1} in worker" in str(found["where"])
    summary = next(line for line in done.stdout.splitlines() if line.startswith("FAILED"))
    assert " - HANG: rank 1 of 2" in summary
    assert f"{passed} passed" in done.stdout or not passed
    assert alive(folder) == []
    failure = ET.parse(folder / "junit.xml").find(".//failure")
    assert failure is not None
    assert failure.get("message", "").startswith("HANG: rank 1 of 2, skipped_collective")
    assert "from pytest-timeout" in (failure.text or ""), "what pytest-timeout says stays below the verdict"
    assert ET.parse(folder / "junit.xml").find(".//property[@name='nsa.verdict']") is not None


def test_the_failure_of_a_test_has_the_exception_of_the_rank_that_it_ran(warm: WarmPython, folder: Path) -> None:
    done = run(warm, folder, RAISES)
    failure = ET.parse(folder / "junit.xml").find(".//failure")
    assert failure is not None
    assert failure.get("message", "").startswith("FAIL: rank 1 of 2, rank_exception"), done.stdout
    assert "beyond tolerance" in (failure.text or "")
    assert f"raises.py:{line_of(RAISES_SCRIPT, 'HERE')}" in (failure.text or "")
    assert "assert done.returncode == 0" in (failure.text or "")
    assert "--- rank 1 ---\nTraceback (most recent call last):" in (failure.text or "")


def test_the_evidence_of_such_ranks_is_masked_and_explains_the_failure(warm: WarmPython, folder: Path) -> None:
    (folder / "raises.py").write_text(RAISES_SCRIPT.replace("beyond tolerance", "beyond tolerance token=urltoken55"))
    done = run(warm, folder, RAISES, "-o", "ranks_mask_output=true")
    latest = folder / "artifacts" / "latest"
    files = [path for path in latest.rglob("*") if path.is_file()]
    assert [path for path in files if b"urltoken55" in path.read_bytes()] == []
    assert "beyond tolerance token=***" in (latest / "SUMMARY.md").read_text(), done.stdout
    assert (latest / "SUMMARY.md").read_text().splitlines()[0].endswith("1 of 1 test fails.")


@pytest.mark.parametrize(("ini", "code"), [pytest.param("false", 0, marks=pytest.mark.slow), ("true", 1)])
def test_processes_that_keep_a_session_from_ending_are_named_and_ended(folder: Path, ini: str, code: int) -> None:
    (folder / "test_it.py").write_text(EXIT)
    line = command("-o", f"ranks_left_fails={ini}")  # not `run`: its interpreter has no handlers of atexit
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(line, cwd=folder, env=environment(), check=False, timeout=170, **output)
    assert done.returncode == code, done.stdout
    assert "1 passed" in done.stdout
    assert "keep this session from ending, left by test_it.py::test_passes; ended" in done.stdout
    assert verdict(folder)["ranks"] == [1]
    assert "rank 1" in (folder / "artifacts" / "latest" / "SUMMARY.md").read_text()
    assert alive(folder) == []


def test_a_suspicion_is_announced_and_ctrl_c_reports_and_ends(warm: WarmPython, folder: Path) -> None:
    (folder / "test_it.py").write_text(SPAWN.replace('at_limit("rank0", "rank1")', "pass"))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = warm.popen(*command()[1:], cwd=folder, env=environment(), nursery=True, **pipes)
    assert process.stdout is not None
    announced = next(line for line in process.stdout if line.startswith("nsa: test_it.py::test_spawns: "))
    assert announced.startswith("nsa: test_it.py::test_spawns: skipped_collective on rank 1 at workers.py:"), announced
    assert "the test's own time limit ends it" in announced
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == pytest.ExitCode.INTERRUPTED
    assert "interrupted; until then" in out
    assert verdict(folder)["ranks"] == [1], out
    latest = folder / "artifacts" / "latest"
    assert announced.strip() in (latest / "test_execution.log").read_text()
    assert "Announced while it ran" in (latest / "report.html").read_text()
    assert alive(folder) == []


def test_what_a_passed_test_leaves_is_named_and_ended_on_request(warm: WarmPython, folder: Path) -> None:
    done = run(warm, folder, LEAVES, "-Werror", nursery=False)  # its environment, in /proc, tells whose it is
    place = f"test_it.py:{line_of(LEAVES, 'def test_leaves')}: PytestWarning: nsa: processes that the test left, still running"
    assert place in done.stdout
    assert done.returncode == 0, "report changes no outcome"
    (left,) = alive(folder)
    os.kill(left, signal.SIGKILL)
    for path in (folder / "pids").iterdir():
        path.unlink()
    done = run(warm, folder, LEAVES, mode="end", nursery=False)
    assert "processes that the test left, ended" in done.stdout
    assert done.returncode == 0
    assert alive(folder) == []


@pytest.mark.slow
def test_an_idle_server_of_a_wider_fixture_is_neither_blamed_nor_ended(warm: WarmPython, folder: Path) -> None:
    done = run(warm, folder, SERVER, mode="end")
    assert "1 failed, 2 passed" in done.stdout, done.stdout
    assert "job of 2 ranks of session fixture server: has made no call since before the test" in done.stdout
    assert "no process of the test has joined a process group" in done.stdout
    assert "nsa: test_it.py::" not in done.stdout, "and no suspicion is announced of it"
    assert alive(folder) == []


def test_off_is_the_default_and_changes_nothing(warm: WarmPython, folder: Path) -> None:
    source = (
        "import os, subprocess\n\ndef test_it():\n    assert not {n for n in os.environ if n.startswith('NSA_TRACE')}\n"
        + ("    assert subprocess.Popen._execute_child.__module__ == 'subprocess'\n")
    )
    (folder / "test_it.py").write_text(source)
    line = [part for part in command()[1:] if not part.startswith("--ranks-descendants")]
    assert warm.call(*line, cwd=folder, env=environment()).returncode == 0
    done = run(warm, folder, "", "-o", "ranks_descendants=kill")
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, "the option wins"
    refused = warm.call(*line, "-o", "ranks_descendants=kill", cwd=folder, env=environment())
    assert refused.returncode == pytest.ExitCode.USAGE_ERROR
    assert "ini ranks_descendants = 'kill': must be off, report or end" in refused.stderr
