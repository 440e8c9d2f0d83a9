"""What `pytest-nsa watch` shows of many ranks and of ranks without evidence, and its output for programs: a command per verdict."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsa.trace.board import Board
from pytest_nsa.cli.main import main
from pytest_nsa.cli.outputs import VerdictCommand
from pytest_nsa.cli.watch import Watcher
from pytest_nsa.observe import observer
from pytest_nsa.system import py_spy
from tests_cpu.sockets import free_port

SLEEPS = """
import sys, time
from pathlib import Path
from nsa.trace.board import Board
boards = [Board(Path(sys.argv[1]) / f"rank{r}" / "board.bin", r, 12) for r in range(12)]
for rank, board in enumerate(boards):
    board.phase("body")
    board.text("line", "train.py:7 in load_undone")
    if rank != 3:
        board.enter("barrier", "0", 1, "", 0, "train.py:9 in main", size=12)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def twelve(tmp_path: Path) -> Iterator[Path]:
    """Yield the folder of twelve ranks, of which rank 3 is not in the barrier of the others."""
    for rank in range(12):
        (tmp_path / f"rank{rank}").mkdir()
    process = subprocess.Popen([sys.executable, "-c", SLEEPS, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield tmp_path
    process.kill()
    process.wait()
    process.stdout.close()


def test_many_ranks_are_shown_by_state_the_rarest_first(twelve: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watcher = Watcher(twelve)
    watcher.look()
    monkeypatch.setattr(watcher.observer.watch, "measure_stall", lambda rank: 2.0 + rank)
    first, second = watcher.lines()
    assert first == "    1  rank 3: step 0  body  at train.py:7 in load_undone  still for 5 s"
    assert second.startswith("   11  ranks 0-2, 4-11: step 0  body  in barrier #1 at train.py:9 in main")
    assert second.endswith("  still for 13 s")


def test_a_command_is_run_once_per_verdict(tmp_path: Path) -> None:
    command = VerdictCommand(
        f"cat >> {tmp_path / 'verdicts'}; echo $NSA_CAUSE $NSA_RANKS $NSA_RETRY >> {tmp_path / 'log'}"
    )
    verdict = {"cause": "transport_stuck", "ranks": [0, 1], "certain": False, "retry": "elsewhere", "reason": "..."}
    for _ in range(3):
        command.give([{"folder": "run", "ranks": [], "verdict": verdict}])
    command.give([{"folder": "run", "ranks": [], "verdict": None}])
    command.finish()
    assert (tmp_path / "log").read_text() == "transport_stuck 0,1 elsewhere\n"
    assert json.loads((tmp_path / "verdicts").read_text())["folder"] == "run"


def test_a_command_that_neither_reads_nor_ends_is_not_waited_for(capfd: pytest.CaptureFixture[str]) -> None:
    command = VerdictCommand("exec sleep 1000")
    for cause in ("slow", "sleeping"):
        verdict = {"cause": cause, "ranks": [0], "certain": False, "retry": "once", "reason": "x" * (1 << 20)}
        command.give([{"folder": "run", "ranks": [], "verdict": verdict}])
    running = list(command._running)
    assert [run.poll() for run in running] == [None, None]
    command.finish(0.1)
    assert capfd.readouterr().err.count("still runs after 0.1 s") == 2
    for run in running:
        run.kill()
        run.wait()


def test_the_board_of_this_process_is_alive(tmp_path: Path) -> None:
    (tmp_path / "rank0").mkdir()
    board = Board(tmp_path / "rank0" / "board.bin", 0, 1)
    board.phase("body")
    watcher = Watcher(tmp_path)
    watcher.look()
    assert watcher.to_json()["ranks"][0] | {"line": ""} == watcher.to_json()["ranks"][0]
    assert watcher.to_json()["ranks"][0]["pid"] == os.getpid()


def test_a_rank_that_ends_well_while_it_is_looked_at_has_not_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rank0").mkdir()
    board = Board(tmp_path / "rank0" / "board.bin", 0, 1)
    board.phase("body")

    def ends(folder: Path, boards: object) -> dict[int, int]:
        board.phase("done")
        return {}

    monkeypatch.setattr(observer, "living_ranks", ends)
    watcher = Watcher(tmp_path)
    watcher.look()
    assert watcher.to_json()["ranks"][0]["gone"] is False
    assert watcher.finding is None


WAITS = """
import os, subprocess, sys, time

def save():
    print(flush=True)
    time.sleep(1000)

save()
"""


@pytest.fixture
def unaided(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start two ranks of a program with a launcher's variables, which leave no evidence, and wait until both wait."""
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
    unaided: list[subprocess.Popen[bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", str(unaided[1].pid), "--once"]) == 0
    out = capsys.readouterr().out
    for number, rank in enumerate(unaided):
        assert f"rank {number}  pid {rank.pid}\n" in out
    assert "NSA_TRACE_DIR" in out
    if py_spy.dump(unaided[0].pid, limit_s=60)[0]:
        assert out.count("save (") == 2
    else:
        assert "py-spy" in out
