"""Which rank is in a later round of the loops, by their counters: only where each loop around both has one."""

import ast

import pytest

from pytest_nsa.diagnosis.explain.counters import find_counter


def find_round(source: str, line: int, **counts: int) -> int | None:
    """Return the round of a line of the loop that ``source`` is."""
    loop = ast.parse(source).body[-1]
    assert isinstance(loop, ast.For)
    return find_counter(loop, line, counts)


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


@pytest.mark.parametrize(
    ("source", "line", "counts"),
    [
        ("for _ in range(9):\n    for _ in range(3):\n        call()\n    other()", 4, {"_": 2}),
        ("for step in range(9):\n    call()", 1, {"step": 4}),
    ],
    ids=["an inner loop takes the variable", "at its head it is between two rounds"],
)
def test_a_loop_without_a_counter(source: str, line: int, counts: dict[str, int]) -> None:
    assert find_round(source, line, **counts) is None
