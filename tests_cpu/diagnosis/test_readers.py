"""Properties of whatever reads a folder: what was written is read back, what else there is neither raises nor is believed."""

import json
import math
import string
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa.trace.board import MAX_PATH, PHASES, RING_SIZE, Board
from pytest_nsa.diagnosis.decision import Decision
from pytest_nsa.diagnosis.verdict import Fact, Verdict
from pytest_nsa.evidence.board import BoardReader, read_numbers
from pytest_nsa.evidence.stacks import Frame, parse_children, parse_dump
from pytest_nsa.wire.files import append_line, parse, read_lines, with_numbers
from pytest_nsa.wire.messages import Job

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)
NAME = st.text(string.ascii_letters + string.digits + "_./", min_size=1, max_size=40)
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)
OBJECT = st.dictionaries(TEXT, VALUE, max_size=6)


@settings(deadline=None)
@given(st.lists(OBJECT, max_size=8), st.binary(max_size=60))
def test_lines_are_read_back_and_a_torn_one_costs_itself_alone(written: list[dict[str, Any]], torn: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lines.jsonl"
        for record in written:
            append_line(path, record)
        with path.open("ab") as file:
            file.write(b"{" + torn.replace(b"\n", b"").replace(b"\r", b""))
        found = list(read_lines(path))
    assert found[: len(written)] == written
    assert len(found) <= len(written) + 1


def test_numbers_that_json_has_not_are_texts_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    written = {"norms": [1.5, math.inf, None], "of": {"loss": -math.inf}, "text": "nano"}
    append_line(path, written)
    append_line(path, {"norms": [math.nan], "pair": (1, math.nan)})
    texts = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    assert texts == [
        {"norms": [1.5, "inf", None], "of": {"loss": "-inf"}, "text": "nano"},
        {"norms": ["nan"], "pair": [1, "nan"]},
    ]
    assert with_numbers(texts[0]) == written
    assert math.isnan(with_numbers(texts[1])["norms"][0])


@settings(deadline=None)
@given(st.binary(max_size=400) | TEXT.map(str.encode))
def test_no_bytes_raise(data: bytes) -> None:
    text = data.decode(errors="replace")
    assert isinstance(parse_dump(text), tuple)
    assert isinstance(parse_children(text), tuple)
    parse(data)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "board.bin"
        path.write_bytes(data)
        assert BoardReader(path).read() is None
        assert read_numbers(path) == {}


CALL = st.tuples(NAME, NAME, st.integers(0, 2**40), st.booleans())


@settings(deadline=None)
@given(
    calls=st.lists(CALL, max_size=2 * RING_SIZE // 100 + 6),
    modules=st.lists(st.tuples(st.integers(0, 60_000), NAME), max_size=20),
    texts=st.fixed_dictionaries({"line": NAME, "parameter": NAME}),
    phase=st.sampled_from(PHASES),
    numbers=st.fixed_dictionaries(
        {"gil_late": st.floats(0, 1e6), "rank": st.integers(0, 2**31), "limit_time": st.floats(0, 1e12)}
    ),
)
def test_a_board_is_read_as_it_was_written(
    calls: list[tuple[str, str, int, bool]], modules: list[tuple[int, str]], texts: dict[str, str], phase: str,
    numbers: dict[str, float],
) -> None:  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "board.bin"
        board = Board(path, 0, 2)
        board.begin_forward()
        for place, name in modules:
            board.called(place, board.padded(name))
        for op, site, count, leaves in calls:
            index = board.enter(op, "0", 1, "float32", count, site, size=2)
            if leaves:
                board.leave(index)
        for name, text in texts.items():
            board.text(name, text)
        for name, number in numbers.items():
            board.number(name, number)
        board.phase(phase)
        found = BoardReader(path).read()
        light = read_numbers(path)
    assert found is not None
    assert found.phase == phase
    assert (found.line, found.parameter) == (texts["line"], texts["parameter"])
    assert {name: found.numbers[name] for name in numbers} == numbers == {name: light[name] for name in numbers}
    assert found.path == tuple(place for place, _ in modules)[:MAX_PATH]
    assert found.module == (modules[-1][1] if modules else "")
    seen = [(c.op, c.site, c.count, not c.is_inside) for c in found.collectives]
    assert seen == [(op[:32], site, count, leaves) for op, site, count, leaves in calls]


FRAME = st.tuples(NAME, st.integers(1, 9999), NAME)


@given(st.lists(st.lists(FRAME, min_size=1, max_size=5), min_size=1, max_size=4), st.data())
def test_a_dump_is_read_as_faulthandler_writes_it(
    threads: list[list[tuple[str, int, str]]], data: st.DataObject
) -> None:
    current = data.draw(st.integers(0, len(threads) - 1))
    text = "\n".join(
        f"{'Current thread' if number == current else 'Thread'} 0x{number + 1:016x} (most recent call first):\n"
        + "".join(f'  File "{file}", line {line} in {function}\n' for file, line, function in frames)
        for number, frames in enumerate(threads)
    )
    found = parse_dump(text)
    assert [list(stack.frames) for stack in found] == [[Frame(*frame) for frame in frames] for frames in threads]
    assert sum(stack.is_main for stack in found) == 1 or all(frames[-1][2] == "_bootstrap" for frames in threads)


@given(st.builds(
    Verdict, nodeid=TEXT, outcome=st.sampled_from(["PASS", "FAIL", "HANG", "CRASH", "SLOW", "SKIP"]), cause=TEXT,
    ranks=st.lists(st.integers(0, 4096), max_size=3).map(tuple), where=TEXT, reason=TEXT, certain=st.booleans(),
    confidence=st.floats(0, 1), duration_s=st.floats(0, 1e6), parameters_missing=st.lists(TEXT, max_size=3).map(tuple),
    evidence=st.lists(st.builds(Fact, rank=st.integers(-1, 9), kind=TEXT, file=TEXT, text=TEXT), max_size=3).map(tuple),
), OBJECT)  # fmt: skip
def test_a_verdict_of_a_later_schema_is_read(verdict: Verdict, more: dict[str, Any]) -> None:
    written = json.loads(json.dumps(verdict.to_json()))
    later = {f"later_{name}": value for name, value in more.items()}
    for fact in written["evidence"]:
        fact.update(later)
    assert Verdict.from_json({**written, **later}) == verdict


@given(st.builds(Decision, sentence=TEXT, action=TEXT, path=st.lists(TEXT, max_size=3).map(tuple)), OBJECT)
def test_a_decision_of_a_later_schema_is_read(decision: Decision, more: dict[str, Any]) -> None:
    later = {f"later_{name}": value for name, value in more.items()}
    assert Decision.from_json({**json.loads(json.dumps(decision.to_json())), **later}) == decision


@given(
    st.builds(
        Job, nodeid=TEXT, folder=TEXT, world_size=st.integers(1, 4096), backend=NAME, arguments=OBJECT, traces=st.just(("grads",)),
    ),
    OBJECT, st.sampled_from(["nodeid", "world_size", "timeout", "traces"]),
)  # fmt: skip
def test_a_job_is_read_or_what_is_wrong_is_named(job: Job, more: dict[str, Any], spoilt: str) -> None:
    written = json.loads(json.dumps(job.to_json()))
    assert Job.from_stranger({**written, **{f"later_{name}": value for name, value in more.items()}}) == job
    with pytest.raises(ValueError, match=spoilt):
        Job.from_stranger({**written, spoilt: None})
