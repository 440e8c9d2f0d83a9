"""Which rank is in a later round of the loops, by their counters: only where each loop around both has one."""

from __future__ import annotations

import ast

import pytest

from pytest_nsa.diagnosis.rules.counters import _round


def round_of(source: str, line: int, **counts: int) -> int | None:
    """Return the round of a line of the one loop that ``source`` is."""
    loop = ast.parse(source).body[0]
    assert isinstance(loop, ast.For | ast.While)
    return _round(loop, line, counts)


@pytest.mark.parametrize(
    ("header", "counts", "expected"),
    [
        ("for step in range(9):", {"step": 4}, 4),
        ("for step in range(9, 0, -1):", {"step": 4}, -4),
        ("for step in reversed(range(9)):", {"step": 4}, -4),
        ("for i, batch in enumerate(loader):", {"i": 2, "batch": 7}, 2),
        ("for i, batch in tqdm(enumerate(loader), total=4):", {"i": 2}, 2),
        ("for batch, step in zip(loader, range(9)):", {"batch": 9, "step": 3}, 3),
        ("for step in itertools.count(1):", {"step": 5}, 5),
        ("for length in lengths:", {"length": 5}, None),  # whole numbers in no order
        ("for key in shuffled(range(9)):", {"key": 5}, None),
        ("for step in range(9):", {}, None),
    ],
)
def test_the_round_of_a_for(header: str, counts: dict[str, int], expected: int | None) -> None:
    assert round_of(f"{header}\n    call()", 2, **counts) == expected


def test_at_its_head_a_loop_is_between_two_rounds() -> None:
    assert round_of("for step in range(9):\n    call()", 1, step=4) is None


def test_a_while_is_counted_by_what_each_round_adds() -> None:
    source = "while step < 9:\n    before()\n    step += 1\n    after()"
    assert round_of(source, 2, step=4) == 4
    assert round_of(source, 4, step=5) == 4  # the same round


def test_a_while_that_adds_under_a_condition_has_no_counter() -> None:
    assert round_of("while step < 9:\n    if good():\n        step += 1\n    after()", 4, step=5) is None
