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


def test_a_loop_whose_variable_an_inner_one_takes_has_no_counter() -> None:
    source = "for _ in range(9):\n    for _ in range(3):\n        call()\n    other()"
    assert find_round(source, 4, _=2) is None


def test_at_its_head_a_loop_is_between_two_rounds() -> None:
    assert find_round("for step in range(9):\n    call()", 1, step=4) is None


def test_a_while_is_counted_by_what_each_round_adds() -> None:
    source = "step = 0\nwhile step < 9:\n    before()\n    step += 1\n    after()"
    assert find_round(source, 3, step=4) == 4
    assert find_round(source, 5, step=5) == 4  # the same round


def test_a_while_that_begins_anywhere_has_no_counter() -> None:
    assert find_round("step = begin\nwhile step < 9:\n    before()\n    step += 1", 3, step=4) is None


def test_a_while_that_adds_under_a_condition_has_no_counter() -> None:
    assert find_round("step = 0\nwhile step < 9:\n    if good():\n        step += 1\n    after()", 5, step=5) is None
