"""Tests that replace the clock or os.write, and an encoding that the environment sets: evidence is as of any test."""

from __future__ import annotations

import pytest

from pytest_nsa.testing import run_example


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
