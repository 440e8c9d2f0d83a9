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
