"""SIGKILL of host, zygote and ranks: what was seen until then is on disk, and `pytest-nsa diagnose` reports it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_nsa.evidence.board import BoardReader
from pytest_nsa.testing import HEADER, read_result, run_example
from pytest_nsa.wire.files import read_lines
from tests_cpu.plugin.sessions import wait_for
from tests_cpu.warm import WarmPython

SLEEPS = """
@world_size(2)
def test_waits(group):
    if group.rank == 1:
        time.sleep(1000)
    dist.barrier()
"""


MOVES = """
@world_size(2)
def test_waits(group):
    while True:
        dist.all_reduce(torch.ones(1))
"""


SENDERS = """
@world_size(2)
def test_by_itself(group):
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()

@world_size(2)
def test_by_another_rank(group):
    pids = [None, None]
    dist.all_gather_object(pids, os.getpid())
    if group.rank == 0:
        os.kill(pids[1], 0)
        os.kill(pids[1], signal.SIGTERM)
    dist.barrier()

@world_size(2)
def test_by_a_process(group):
    if group.rank == 1:
        subprocess.run(["kill", "-KILL", str(os.getpid())])
    dist.barrier()
"""
FILLS_MEMORY = """
from pytest_nsa import world_size

@world_size(2)
def test_fills_memory(group):
    if group.rank == 1:
        [b"x" * (64 << 20) for _ in range(64)]
"""


def tree(pid: int) -> list[int]:
    """Return the ids of a process and all below it: host, zygote, ranks."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(below for child in children for below in tree(int(child)))]


@pytest.fixture
def session(warm: WarmPython, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    (tmp_path / "test_example.py").write_text(HEADER + getattr(request, "param", SLEEPS))
    command = ("-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path))
    process = warm.popen(*command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    yield process
    if process.poll() is None:
        process.kill()
    process.wait()


def diagnosed(run: Path) -> dict[str, object]:
    command = [sys.executable, "-m", "pytest_nsa", "diagnose", str(run), "--json"]
    done = subprocess.run(command, text=True, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    verdict: dict[str, object] = json.loads(done.stdout)
    return verdict


SLOW = [pytest.param(killed, marks=pytest.mark.slow) for killed in ("all", "zygote and ranks")]


@pytest.mark.parametrize("killed", ["host", "zygote", *SLOW])
def test_who_is_killed(tmp_path: Path, session: subprocess.Popen[str], killed: str) -> None:
    run = tmp_path / "artifacts" / "latest"
    wait_for(lambda: list(run.glob("*test_waits*/suspicions.jsonl")), session)
    pids = tree(session.pid)
    assert len(pids) == 4
    which = {"all": slice(None), "host": slice(1), "zygote": slice(1, 2), "zygote and ranks": slice(1, None)}[killed]
    for pid in pids[which]:
        os.kill(pid, signal.SIGKILL)
    session.wait(60)
    verdict = diagnosed(run)
    assert (verdict["outcome"], verdict["cause"], verdict["ranks"]) == ("HANG", "sleeping", [1])
    assert str(verdict["where"]).startswith("test_example.py:")
    assert ("the ranks were lost" in "; ".join([verdict["reason"], *verdict["because"]])) == (
        not killed.startswith(("all", "host"))
    )


@pytest.mark.parametrize("moment", ["job.json", "rank1/board.bin", "rank1/stall.json", "stall"])
def test_all_are_killed_at(tmp_path: Path, session: subprocess.Popen[str], moment: str) -> None:
    """At earlier moments less is known: then the cause is unknown, and no other one."""
    run = tmp_path / "artifacts" / "latest"

    def seen() -> bool:
        folder = next(iter(run.glob("*test_waits*")), run)
        if moment == "stall":
            return any(line["event"] == "stall" for line in read_lines(folder / "host.jsonl"))
        if moment.endswith("board.bin"):  # the file is there, empty, before its rank is
            return BoardReader(folder / moment).read() is not None
        return (folder / moment).exists()

    wait_for(seen, session)
    for pid in tree(session.pid):
        os.kill(pid, signal.SIGKILL)
    session.wait(60)
    verdict = diagnosed(run)
    assert verdict["cause"] in {"sleeping"} | ({"unknown"} if moment != "stall" else set()), verdict
    assert verdict["outcome"] != "PASS"


@pytest.mark.parametrize("session", [MOVES], indirect=True)
def test_all_are_killed_while_they_move(tmp_path: Path, session: subprocess.Popen[str]) -> None:
    """A rank that is in the middle of a collective at that moment is not blocked in it."""
    run = tmp_path / "artifacts" / "latest"

    def both_have_reduced() -> bool:
        boards = [BoardReader(path).read() for path in run.glob("*test_waits*/rank*/board.bin")]
        return len(boards) == 2 and all(b is not None and b.numbers["collectives_entered"] > 100 for b in boards)

    wait_for(both_have_reduced, session)
    for pid in tree(session.pid):
        os.kill(pid, signal.SIGKILL)
    session.wait(60)
    verdict = diagnosed(run)
    assert (verdict["outcome"], verdict["cause"]) == ("FAIL", "unknown")
    assert "was killed while they made progress; rank 0 at test_example.py:" in "; ".join(
        [verdict["reason"], *verdict["because"]]
    )


@pytest.mark.slow
def test_a_link_that_goes_down_is_the_transport(tmp_path: Path) -> None:
    """A rank takes down the loopback of a network namespace of its own: packets are lost without an error."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-n", "true"], check=False).returncode:
        pytest.skip("no network namespace can be made here")
    if shutil.which("ip") is None:
        pytest.skip("no `ip` command: iproute2 is not installed")
    (tmp_path / "test_example.py").write_text(
        HEADER
        + """
import subprocess

@world_size(2)
@pytest.mark.timeout(60)
def test_reduces(group):
    dist.all_reduce(torch.ones(1))
    if group.rank == 0:
        subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
    dist.all_reduce(torch.ones(1 << 20))
"""
    )
    pytest_command = f"exec {sys.executable} -m pytest -p no:cacheprovider --rootdir . -o ranks_hang_after=3"
    done = subprocess.run(
        ["unshare", "-n", "sh", "-c", f"ip link set lo up && {pytest_command}"],
        cwd=tmp_path, text=True, capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    print(done.stdout, done.stderr)
    result = read_result(tmp_path, pytest.RunResult(done.returncode, done.stdout.splitlines(), [], 0))
    verdict = result.verdicts["test_reduces"]
    assert (verdict.outcome, verdict.cause, verdict.ranks) == ("HANG", "transport_stuck", (0, 1))
    assert "test_example.py:14" in verdict.where
    assert "bytes unsent" in verdict.explanation


def test_the_sender_of_a_signal(pytester: pytest.Pytester) -> None:
    result = run_example(pytester, "import signal, subprocess\n" + SENDERS, "-o", "ranks_rerun=off")
    assert {name: (v.cause, v.ranks) for name, v in result.verdicts.items()} == dict.fromkeys(
        ("test_by_itself", "test_by_another_rank", "test_by_a_process"), ("rank_died", (1,))
    )
    assert {name: v.reason.partition("SIG")[2] for name, v in result.verdicts.items()} == {
        "test_by_itself": "KILL, sent by itself",
        "test_by_another_rank": "TERM, sent by rank 0",
        "test_by_a_process": "KILL",
    }


@pytest.fixture
def little_memory() -> Iterator[Path]:
    """Yield the folder of a control group with 1,500 MiB, below this process's."""
    groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    found = next((path for _, controllers, path in groups if controllers == "memory"), None)
    folder = Path(f"/sys/fs/cgroup/memory{found}/nsa_little_memory_{os.getpid()}")
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(1500 << 20))
    except OSError as error:
        pytest.skip(f"needs control groups of version 1 that it may make: {error}")
    yield folder
    folder.rmdir()


def test_the_kernel_ends_a_rank_for_memory(pytester: pytest.Pytester, little_memory: Path) -> None:
    pytester.makepyfile(FILLS_MEMORY)
    command = f"echo $$ > {little_memory}/cgroup.procs; exec {sys.executable} -m pytest -p no:cacheprovider -o ranks_rerun=off"
    done = subprocess.run(["sh", "-c", command], cwd=pytester.path, timeout=120, check=False)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    (verdict,) = read_lines(pytester.path / "artifacts" / "latest" / "verdicts.jsonl")
    assert (verdict["outcome"], verdict["cause"], verdict["ranks"]) == ("FAIL", "oom", [1])
