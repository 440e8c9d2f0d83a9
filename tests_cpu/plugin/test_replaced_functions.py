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


def test_functions_of_the_interpreter_that_a_test_replaces(pytester: pytest.Pytester) -> None:
    """The heartbeat and the reports of a rank use the functions that were bound before."""
    source = """
    import builtins, json

    @world_size(2)
    def test_it(group, monkeypatch):
        def refuse(*_, **__): raise OSError("replaced")

        for owner, name in ((builtins, "open"), (json, "dumps"), (json, "loads"), (os, "kill"), (os, "getpid")):
            monkeypatch.setattr(owner, name, refuse)
        dist.barrier()
        assert group.rank == 0
    """
    verdict = run_example(pytester, source).verdicts["test_it"]
    assert (verdict.cause, verdict.ranks, verdict.reason) == ("assertion", (1,), "AssertionError: assert 1 == 0")


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
