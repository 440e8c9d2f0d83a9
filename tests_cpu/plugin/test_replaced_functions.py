"""Tests that replace the clock or os.write, and an encoding that the environment sets: evidence is as of any test."""

from __future__ import annotations

import pytest

from pytest_nsa.testing import run_example

SOURCE = """
@pytest.fixture
def frozen_time(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)


@world_size(2)
@pytest.mark.timeout(4)
def test_frozen(group, frozen_time):
    if group.rank == 1:
        threading.Event().wait()
    dist.barrier()


@world_size(2)
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("closed")])
def test_cannot_write(group, monkeypatch, error):
    def refuse(*_): raise error

    monkeypatch.setattr(os, "write", refuse)
    assert group.rank == 0
"""


def test_a_rank_prints_in_utf_8_whatever_the_environment(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    source = """
    @world_size(2)
    def test_prints(group):
        print("f\u00fcr alle")
        assert group.rank == 2
    """
    result = run_example(pytester, source)
    assert result.verdicts["test_prints"].reason == "AssertionError: assert 0 == 2"
    assert "f\u00fcr alle" in (result.folder("test_prints") / "rank1" / "output.log").read_text(encoding="utf-8")


def test_a_frozen_clock_and_a_disk_that_a_test_fills(pytester: pytest.Pytester) -> None:
    verdicts = run_example(pytester, SOURCE).verdicts
    frozen = verdicts.pop("test_frozen")
    assert (frozen.cause, frozen.ranks) == ("lock_deadlock", (1,))
    assert len(verdicts) == 2
    assert {(v.cause, v.ranks, v.reason) for v in verdicts.values()} == {
        ("assertion", (1,), "AssertionError: assert 1 == 0")
    }
