"""Which of two ranks is ahead in the program, by lines, loops and counters."""

import textwrap

import pytest

from pytest_nsa.diagnosis.explain.program import Frame, Order, compare
from pytest_nsa.evidence.board import Collective
from pytest_nsa.evidence.source import Snippet, Sources

FUNCTION = """
def train(n, data, sizes):
    for epoch in range(n):
        start(epoch)
        for batch in data:
            step()
        for size in sizes:
            part(size)
        if epoch % 2:
            save()
        else:
            report()
        end()
    total = 0
    while total < n:
        total += 1
        more()
    last()
"""
LINES = {line.strip().split("(")[0]: number for number, line in enumerate(FUNCTION.strip().splitlines(), start=1)}


def sources(text: str = FUNCTION) -> Sources:
    return Sources([Snippet("/tests/a.py", 1, textwrap.dedent(text).strip())])


def at(call: str, **counters: int) -> tuple[Frame, ...]:
    return (Frame(f"/tests/a.py:{LINES[call]} in train", counters),)


def latest(call: str) -> Collective:
    site = f"/tests/a.py:{LINES[call]} in train"
    return Collective(
        index=0, op="allreduce", group="0", sequence=1, dtype="", count=0, site=site, step=0, phase="body", peer=-1, size=2,
        entered=1.0, left=2.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("one", "other", "order"),
    [
        (at("start", epoch=2), at("end", epoch=1), Order.AFTER),  # a round later, on an earlier line
        (at("start", epoch=1), at("end", epoch=1), Order.BEFORE),
        (at("save", epoch=1), at("report", epoch=1), Order.EXCLUSIVE),
        (at("save", epoch=1), at("report", epoch=2), Order.BEFORE),
        (at("part", epoch=1, size=6), at("part", epoch=1, size=4), Order.SAME),  # a size counts no rounds
        (at("more", total=3), at("more", total=2), Order.AFTER),
        (at("last"), at("more", total=2), Order.AFTER),
        (at("step", epoch=0), at("last"), Order.BEFORE),
    ],
    ids=lambda value: value.value if isinstance(value, Order) else value[0].place.partition(" ")[0].rpartition("/")[2],
)
def test_order(one: tuple[Frame, ...], other: tuple[Frame, ...], order: Order) -> None:
    assert compare(sources(), one, other, None).order is order
    assert compare(sources(), other, one, None).order is order.turned


def test_a_loop_that_nothing_counts_is_gone_round_from_the_latest_common_call() -> None:
    text = FUNCTION.replace("epoch in range(n)", "epoch in names")
    assert compare(sources(text), at("start"), at("end"), latest("step")).order is Order.AFTER
    assert compare(sources(text), at("part"), at("end"), latest("start")).order is Order.BEFORE
    # At the line of the latest common call it is assumed, and said.
    found = compare(sources(text), at("start"), at("end"), latest("start"))
    assert (found.order, found.is_assumed) == (Order.AFTER, True)
    # A rank has made one round more, as its own calls count them.
    assert compare(sources(text), at("start"), at("step"), latest("step")).order is Order.BEFORE
    assert compare(sources(text), at("start"), at("step"), latest("step"), rounds=(1, 0)).order is Order.AFTER


def test_without_its_source_a_place_is_not_known() -> None:
    assert compare(Sources([]), at("start"), at("end"), None).order is Order.UNKNOWN
