"""The counters of the loops that a thread is in, by its frames."""

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from nsa.trace.stall.counters import FILE, counted_names, counters_of, write_counters
from nsa.trace.stall.exceptions import record_exception


def of_ranges(then: Callable[[], object]) -> None:
    for epoch in range(3):
        for i, (key, value) in enumerate([("a", 1.5)] * 2):
            if (epoch, i) == (2, 1):
                assert (key, value) == ("a", 1.5)
                then()


def of_a_while(then: Callable[[], object]) -> None:
    step, seen, whole = 0, 0, 7
    while step < 4:
        step += 1
        seen = seen + whole
        if step == 3:
            then()


def of_a_closure(then: Callable[[], object]) -> None:
    for attempt in range(2):

        def told() -> int:
            return attempt  # noqa: B023

        if attempt:
            then()
            assert told() == 1


@pytest.mark.parametrize(
    ("function", "expected"),
    [(of_ranges, {"epoch": 2, "i": 1}), (of_a_while, {"step": 3}), (of_a_closure, {"attempt": 1})],
)
def test_the_counters_of_a_function(function: Callable[[Callable[[], object]], None], expected: dict[str, int]) -> None:
    found: list[dict[str, int]] = []
    function(lambda: found.append(counters_of(sys._getframe(1))))
    assert found == [expected]


def test_texts_flags_and_numbers_that_nothing_counts_are_left_out() -> None:
    def body() -> None:
        secret, flag = 4711, True
        for name in ("a", "b"):
            flag = flag and bool(name and secret)

    assert counted_names(body.__code__) == ("name",)


def test_what_a_thread_is_in_is_written_outermost_first(tmp_path: Path) -> None:
    begun, until = threading.Event(), threading.Event()

    def inner() -> None:
        for batch in range(5):
            if batch == 4:
                begun.set()
                until.wait(60)

    def outer() -> None:
        for epoch in range(2):
            if epoch:
                inner()

    thread = threading.Thread(target=outer)
    thread.start()
    try:
        assert begun.wait(60)
        write_counters(tmp_path, thread.ident or 0)
    finally:
        until.set()
        thread.join()
    frames = json.loads((tmp_path / FILE).read_text())["frames"]
    assert [f["counters"] for f in frames] == [{"epoch": 1}, {"batch": 4}]
    assert all(f["at"].startswith(f"{os.path.realpath(__file__)}:") for f in frames)


def fails_in_a_round(group: dict[str, float]) -> None:
    for step in range(5):
        group["rate"] = 0.1 * step
        if step == 3:
            raise ValueError("a bad batch")


def test_an_exception_is_written_with_its_stack_and_its_counters(tmp_path: Path) -> None:
    try:
        fails_in_a_round({})
    except ValueError as error:
        record_exception(tmp_path, error, "call")
    event = json.loads((tmp_path / "events.jsonl").read_text())
    assert [name for _, _, name in event["stack"]] == [
        "test_an_exception_is_written_with_its_stack_and_its_counters", "fails_in_a_round",
    ]  # fmt: skip
    assert event["counters"][-1] == {
        "at": f"{event['file']}:{event['line']} in fails_in_a_round",
        "counters": {"step": 3},
    }
