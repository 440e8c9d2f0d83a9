"""When a stall is announced depends on what the rank does, and is never sooner than its own past suggests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pytest_nsa.observe import progress


def board(step: int, line: str) -> Any:
    """Return as much of a board as `progress.Past` needs."""
    return SimpleNamespace(numbers={"step": step}, line=line, blocked=None)


def test_a_pause_may_last_twice_as_long_as_the_longest_at_its_place() -> None:
    past = progress.Past()
    past.moved(0, board(0, "train.py:8 in save"), board(0, "train.py:9 in save"), 18.0)
    assert past.limit(3.0, "train.py:12 in save") == 36.0
    assert past.limit(3.0, "train.py:12 in load") == 3.0


def test_a_stall_is_longer_than_five_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(progress, "monotonic", lambda: now)
    past = progress.Past()
    for step in range(6):
        past.moved(0, board(step, ""), board(step + 1, ""), 0.0)
        now += 2.0
    assert past.limit(3.0, "train.py:1 in step") == 10.0


IMPORTS = """
import os
import time
import torch.distributed as dist
import torch.multiprocessing as mp

def worker(rank, store):
    time.sleep(5 * rank)  # as an import would
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    dist.destroy_process_group()

def test_spawns(tmp_path):
    mp.spawn(worker, args=(str(tmp_path / "store"),), nprocs=2)
"""


def test_a_rank_that_has_left_no_evidence_is_announced_late(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(IMPORTS)
    done = pytester.runpytest_subprocess("--ranks-descendants=report", "-p", "no:randomly", timeout=120)
    done.assert_outcomes(passed=1)
    assert "nsa:" not in done.stderr.str()
