"""Which rank is in a later round of the loops, by their counters: only where each loop around both has one."""

import ast
import textwrap

import pytest

from pytest_nsa.diagnosis.explain.counters import find_counter


def find_round(source: str, line: int, **counts: int) -> int | None:
    """Return the round of a line of the loop that a function's last statement is; ``source`` is its body, from line 1."""
    scope = ast.parse("def f():\n" + textwrap.indent(source, "    ")).body[0]
    ast.increment_lineno(scope, -1)
    assert isinstance(scope, ast.FunctionDef)
    loop = scope.body[-1]
    assert isinstance(loop, ast.For | ast.While)
    return find_counter(loop, line, counts, scope)


@pytest.mark.parametrize(
    ("header", "counts", "expected"),
    [
        ("for step in range(9):", {"step": 4}, 4),
        ("for step in range(9, 0, -1):", {"step": 4}, -4),
        ("for i, batch in enumerate(loader):", {"i": 2, "batch": 7}, 2),
        ("for i, batch in tqdm(enumerate(loader), total=4):", {"i": 2}, 2),
        ("for step in itertools.count(1):", {"step": 5}, 5),
        ("for length in lengths:", {"length": 5}, None),  # whole numbers in no order
        ("for key in shuffled(range(9)):", {"key": 5}, None),
        ("for step in range(9):", {}, None),
        ("for step in range(1, epochs):", {"step": 4}, 4),
        ("for step in range(begin, 9):", {"step": 4}, None),  # which may be another one on another rank
        ("for i in range(rank, 9, world_size):", {"i": 4}, None),
        ("for i in range(0, len(x), part):", {"i": 4}, 4),
        ("for i in range(8, 0, -part):", {"i": 4}, -4),
        ("for i in itertools.count(rank):", {"i": 4}, None),
        ("for i, batch in enumerate(loader, seen):", {"i": 4}, None),
    ],
)
def test_the_round_of_a_for(header: str, counts: dict[str, int], expected: int | None) -> None:
    assert find_round(f"{header}\n    call()", 2, **counts) == expected


WHILE = "step = 0\nwhile step < 9:\n    before()\n    step += 1\n    after()"


@pytest.mark.parametrize(
    ("source", "line", "counts", "expected"),
    [
        # An inner loop takes the variable.
        ("for _ in range(9):\n    for _ in range(3):\n        call()\n    other()", 4, {"_": 2}, None),
        # At its head a loop is between two rounds.
        ("for step in range(9):\n    call()", 1, {"step": 4}, None),
        (WHILE, 3, {"step": 4}, 4),
        (WHILE, 5, {"step": 5}, 4),  # the same round
        (WHILE.replace("= 0", "= begin"), 3, {"step": 4}, None),
        (WHILE.replace("before()", "if good():").replace("    step +=", "        step +="), 5, {"step": 5}, None),
    ],
    ids=["an inner loop", "at its head", "a while", "after what it adds", "begins anywhere", "adds under a condition"],
)
def test_the_round_of_another_loop(source: str, line: int, counts: dict[str, int], expected: int | None) -> None:
    assert find_round(source, line, **counts) == expected
