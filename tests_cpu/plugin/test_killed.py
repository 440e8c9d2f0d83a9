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
from pytest_nsa.system.procfs import list_children
from pytest_nsa.testing import HEADER, read_result
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


def tree(pid: int) -> list[int]:
    """Return the ids of a process and all below it: host, zygote, ranks."""
    return [pid, *(below for child in list_children(pid) for below in tree(child))]


def kill(session: subprocess.Popen[str], which: slice = slice(None)) -> None:
    """SIGKILL host, zygote and ranks, or some of them, and wait for the host's end."""
    for pid in tree(session.pid)[which]:
        os.kill(pid, signal.SIGKILL)
    session.wait(60)


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
    assert len(tree(session.pid)) == 4
    kill(
        session,
        {"all": slice(None), "host": slice(1), "zygote": slice(1, 2), "zygote and ranks": slice(1, None)}[killed],
    )
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
    kill(session)
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
    kill(session)
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
