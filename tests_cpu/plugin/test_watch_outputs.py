"""What `pytest-nsa watch` shows of many ranks, and its output for programs: a command per verdict."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsa.trace.board import Board
from pytest_nsa.cli.watch import Watcher
from pytest_nsa.observe import observer

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
    monkeypatch.setattr(watcher.observer.watch, "stalled_for", lambda rank: 2.0 + rank)
    first, second = watcher.lines()
    assert first == "    1  rank 3: step 0  body  at train.py:7 in load_undone  still for 5 s"
    assert second.startswith("   11  ranks 0-2, 4-11: step 0  body  in barrier #1 at train.py:9 in main")
    assert second.endswith("  still for 13 s")


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
