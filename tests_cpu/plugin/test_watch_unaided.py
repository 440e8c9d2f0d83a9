"""`pytest-nsa watch PID` of a job that leaves no evidence: py-spy's stacks of its ranks, where py-spy can read them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_nsa.cli.main import main
from pytest_nsa.system import py_spy
from tests_cpu.sockets import free_port

WAITS = """
import os, subprocess, sys, time

def save():
    print(flush=True)
    time.sleep(1000)

save()
"""


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start two ranks of a program with the variables that a launcher sets, and wait until both wait."""
    (tmp_path / "job.py").write_text(WAITS)
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    found = [
        subprocess.Popen(
            [sys.executable, "job.py"], env={**os.environ, **variables, "RANK": str(rank)}, cwd=tmp_path, stdout=subprocess.PIPE
        )
        for rank in (0, 1)
    ]  # fmt: skip
    for rank in found:
        assert rank.stdout is not None
        rank.stdout.readline()
    yield found
    for rank in found:
        rank.kill()
        rank.communicate()


def test_ranks_are_found_by_their_variables(
    ranks: list[subprocess.Popen[bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", str(ranks[1].pid), "--once"]) == 0
    out = capsys.readouterr().out
    for number, rank in enumerate(ranks):
        assert f"rank {number}  pid {rank.pid}\n" in out
    assert "NSA_TRACE_DIR" in out
    if py_spy.dump(ranks[0].pid, limit_s=60)[0]:
        assert out.count("save (") == 2
    else:
        assert "py-spy" in out
