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


INSERTED = """
import os, pytest

@pytest.fixture
def server():
    with open("set_up", "a") as file:
        file.write(os.environ.get("RANK", "host") + " ")

def pytest_HOOK:
    for item in ITEMS:
        item.fixturenames.insert(0, "server")
"""


@pytest.mark.parametrize("hook", ["collection_modifyitems(items)", "itemcollected(item)"])
def test_a_fixture_that_a_hook_adds_is_set_up_on_the_ranks_alone(pytester: pytest.Pytester, hook: str) -> None:
    items = "items" if "modify" in hook else "[item]"
    pytester.makeconftest(INSERTED.replace("HOOK", hook).replace("ITEMS", items))

    result = run_example(pytester, "@world_size(2)\ndef test_it(group): pass")
    assert result.outcomes == {"passed": 1}
    assert sorted((pytester.path / "set_up").read_text().split()) == ["0", "1"]
