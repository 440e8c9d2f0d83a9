"""Snapshots in tests on ranks: syrupy's are refused, inline-snapshot's are refused without a value."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_nsa.testing import run_example

STORED = """\
# serializer version: 1
# name: test_plain
  dict({
    'a': 1,
  })
# ---
# name: test_ranked
  dict({
    'size': 2,
  })
# ---
"""
RANKED_AND_PLAIN = """
@pytest.fixture
def mine(snapshot): return snapshot

@world_size(2)
def test_ranked(group, mine): assert {"size": group.world_size} == mine

def test_plain(snapshot): assert {"a": 1} == snapshot
"""
COMPARED_OUTSIDE = """
def size(group): print(group.world_size)

def test_launched(launch, snapshot): assert launch(size).output(1) == snapshot
"""


@pytest.fixture
def stored(pytester: pytest.Pytester) -> Path:
    """The file of the example's snapshots."""
    pytest.importorskip("syrupy", reason="the extra 'test' has it")
    path = pytester.path / "__snapshots__" / "test_example.ambr"
    path.parent.mkdir()
    path.write_text(STORED)
    return path


@pytest.mark.parametrize("arguments", [(), ("--snapshot-update",)], ids=["compare", "update"])
def test_a_ranked_test_with_snapshots_is_refused_and_none_is_deleted(
    pytester: pytest.Pytester, stored: Path, arguments: tuple[str, ...]
) -> None:
    result = run_example(pytester, RANKED_AND_PLAIN, "-p", "syrupy", *arguments)
    assert result.outcomes == {"passed": 1, "errors": 1}
    assert "test_ranked" not in result.verdicts
    assert "takes syrupy's 'snapshot'" in result.stdout
    assert stored.read_text() == STORED


def test_what_ranks_print_is_compared_in_a_test_without_ranks(pytester: pytest.Pytester, stored: Path) -> None:
    result = run_example(pytester, COMPARED_OUTSIDE, "-p", "syrupy", "--snapshot-update")
    assert result.outcomes == {"passed": 1}
    assert "# name: test_launched\n" in stored.read_text()


INLINE = """
from inline_snapshot import snapshot

@world_size(2)
def test_ranked(group): assert 5 == snapshot()

@world_size(2)
def test_has_its_value(group): assert 2 == snapshot(2)

def test_plain(): assert 6 == snapshot()
"""


def test_inline_snapshots_without_a_value_are_refused(pytester: pytest.Pytester) -> None:
    pytest.importorskip("inline_snapshot", reason="the extra 'test' has it")
    result = run_example(pytester, INLINE, "-p", "inline_snapshot", "--inline-snapshot=create")
    assert result.verdicts["test_ranked"].reason.startswith("Failed: inline-snapshot: a snapshot() has no value")
    assert result.verdicts["test_ranked"].where.startswith("test_example.py:8 ")
    assert "test_has_its_value" not in result.verdicts or not result.verdicts["test_has_its_value"].failed
    source = (pytester.path / "test_example.py").read_text()
    assert "5 == snapshot()" in source
    assert "6 == snapshot(6)" in source
    # The error is the plain test's: inline-snapshot has just created its value.
    assert result.outcomes == {"failed": 1, "passed": 2, "errors": 1}
