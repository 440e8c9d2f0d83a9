"""The values by which a statement decided otherwise on two ranks, and the lines that set them, backwards."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath

from pytest_nsa.flow.align import Parting
from pytest_nsa.flow.read import Flow, Frame
from pytest_nsa.flow.source import Statement, read_source

MOST_STEPS = 4
LEFT = "left the loop"
ARGUMENT = -1  # the index at which arguments are set
# What may differ from rank to rank by right, by the names in a statement.
_BY_RIGHT = {
    "the rank": re.compile(r"(?i)rank|world_size"),
    "random numbers": re.compile(r"(?i)\brand|random|shuffle|sample|seed"),
    "the clock": re.compile(r"\btime\b|monotonic|perf_counter|\bnow\b"),
}


@dataclass(frozen=True, slots=True)
class Step:
    """A value that differs: its name, its text on the two ranks, and the line that set it ('' where that is not recorded)."""

    name: str
    values: tuple[str, str]
    where: str
    statement: str
    by_right: str = ""  # what this value follows from, where ranks may differ in it


@dataclass(frozen=True, slots=True)
class _Value:
    """A value of a name, and where it was set: a frame and the index of the line; `ARGUMENT` for an argument."""

    text: str
    frame: Frame
    index: int
    is_set: bool


def differing(parting: Parting, flows: tuple[Flow, Flow]) -> dict[str, tuple[str, str]]:
    """Return the names that a statement reads and that differ, with the text of each on the two ranks."""
    found = {}
    for name in _names(parting.source.statement(parting.line)):
        mine, others = (_value(of, f, at, name) for of, f, at in zip(flows, parting.frames, parting.at, strict=True))
        if mine is not None and others is not None and mine.text != others.text:
            found[name] = mine.text, others.text
    return found


def trace_back(parting: Parting, flows: tuple[Flow, Flow]) -> list[Step]:
    """Return the values that differ at a statement, and the lines that set them, at most `MOST_STEPS` one behind the other."""
    found: list[Step] = []
    seen: set[tuple[str, str, int]] = set()
    todo = [(parting.frames, parting.at, 0)]
    while todo:
        frames, at, depth = todo.pop(0)
        if depth >= MOST_STEPS:
            continue
        inner = _returned_by_calls(frames, at)
        if inner is not None:
            name, mine, others = inner
            found.append(_step(name, mine, others))
            todo.append(((mine.frame, others.frame), (mine.index, others.index), depth + 1))
        for name, mine, others in _differing_values(frames, at, flows):
            key = name, mine.frame.file, mine.frame.lines[mine.index] if mine.index >= 0 else mine.frame.first
            if key in seen:
                continue
            seen.add(key)
            found.append(_step(name, mine, others))
            mine, others = _before_steps(mine, name), _before_steps(others, name)
            if mine.text != others.text and found[-1] != (begun := _step(name, mine, others)):
                found.append(begun)
            following = _following(mine, others)
            if following is not None and not found[-1].by_right:
                todo.append((*following, depth + 1))
    return found


def _returned_by_calls(frames: tuple[Frame, Frame], at: tuple[int, int]) -> tuple[str, _Value, _Value] | None:
    """Return the function that a line called and that returned other values on the two ranks, with the lines that returned them."""
    pairs = zip(*(frame.children.get(k, ()) for frame, k in zip(frames, at, strict=True)), strict=False)
    for mine, others in pairs:
        is_one = mine.function == others.function and mine.lines and others.lines
        if is_one and mine.returned != others.returned and mine.lines[-1] == others.lines[-1]:
            values = (_Value(f.returned, f, len(f.lines) - 1, is_set=True) for f in (mine, others))
            return (f"{mine.name}()", *values)  # type: ignore[return-value]
    return None


def _differing_values(
    frames: tuple[Frame, Frame], at: tuple[int, int], flows: tuple[Flow, Flow]
) -> Iterator[tuple[str, _Value, _Value]]:
    line = frames[0].lines[at[0]] if 0 <= at[0] < len(frames[0].lines) else frames[0].first
    for name in _names(read_source(frames[0].file).statement(line)):
        mine, others = (_value(of, f, k, name) for of, f, k in zip(flows, frames, at, strict=True))
        if mine is not None and others is not None and mine.text != others.text:
            yield name, _setter(flows[0], mine, name), _setter(flows[1], others, name)


def _names(statement: Statement) -> list[str]:
    """Return the names and chains of attributes that a statement reads, without its body, the longest first."""
    if isinstance(statement, int):
        return []
    match statement:
        case ast.If() | ast.While():
            parts: list[ast.AST] = [statement.test]
        case ast.For() | ast.AsyncFor():
            parts = [statement.iter]
        case ast.Match():
            parts = [statement.subject]
        case ast.With() | ast.AsyncWith():
            parts = [item.context_expr for item in statement.items]
        case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
            parts = [statement.value] if statement.value is not None else []
            if isinstance(statement, ast.AugAssign):
                parts.append(statement.target)
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Try():
            parts = []
        case _:
            parts = [statement]
    return sorted({name for part in parts for name in _chains(part)}, key=lambda name: (-name.count("."), name))


def _chains(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name):
        yield node.id
        return
    if isinstance(node, ast.Attribute):
        parts, inner = [node.attr], node.value
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name):
            names = [inner.id, *reversed(parts)]
            yield from (".".join(names[:n]) for n in range(len(names), 0, -1))
            return
    for child in ast.iter_child_nodes(node):
        yield from _chains(child)


def _value(flow: Flow, frame: Frame, at: int, name: str) -> _Value | None:
    """Return the value that a name had in a frame at the line of an index: as the line read it, or as it was set before."""
    for index in range(at, ARGUMENT - 1, -1):
        read = frame.reads.get(index, {}).get(name)
        if read is not None:
            return _Value(read, frame, index, is_set=False)
        held = frame.values.get(index, {}).get(name) if index < at or index == ARGUMENT else None
        if held is not None:
            return _Value(held, frame, index, is_set=True)
    if "." not in name or not 0 <= at < len(frame.sets_at):
        return None
    last = "." + name.rpartition(".")[2]  # an attribute, which another function may have set
    found = next((s for s in reversed(flow.sets[: frame.sets_at[at]]) if s[0].endswith(last)), None)
    return None if found is None else _Value(found[1], found[2], found[3], is_set=True)


def _setter(flow: Flow, value: _Value, name: str) -> _Value:
    """Return where a value was set, where that is recorded; an attribute may have been set in another function."""
    if value.is_set:
        return value
    frame = value.frame
    for index in range(value.index - 1, ARGUMENT - 1, -1):
        if frame.values.get(index, {}).get(name) == value.text:
            return _Value(value.text, frame, index, is_set=True)
    if "." in name:
        last = "." + name.rpartition(".")[2]
        for set_name, text, of, index in reversed(flow.sets):
            if set_name.endswith(last) and text == value.text:
                return _Value(text, of, index, is_set=True)
    return value


def _before_steps(value: _Value, name: str) -> _Value:
    """Return the value of a name before a line that counts it up or down: where another line set it."""
    frame, index = value.frame, value.index
    if (
        not value.is_set
        or index < 0
        or not isinstance(read_source(frame.file).statement(frame.lines[index]), ast.AugAssign)
    ):
        return value
    line = frame.lines[index]
    for k in range(index - 1, ARGUMENT - 1, -1):
        text = frame.values.get(k, {}).get(name)
        if text is not None and (k == ARGUMENT or frame.lines[k] != line):
            return _Value(text, frame, k, is_set=True)
    return value


def _step(name: str, mine: _Value, others: _Value) -> Step:
    frame, index = mine.frame, mine.index
    if not mine.is_set:
        return Step(name, (mine.text, others.text), "", "", "")
    if index == ARGUMENT and frame.above is not None:
        frame, index = frame.above, frame.above_at
    line = frame.lines[index] if 0 <= index < len(frame.lines) else frame.first
    text = read_source(frame.file).head(line)
    by_right = next((what for what, names in _BY_RIGHT.items() if names.search(text.partition("=")[2] or text)), "")
    return Step(name, (mine.text, others.text), place(frame, line), text, by_right)


def _following(mine: _Value, others: _Value) -> tuple[tuple[Frame, Frame], tuple[int, int]] | None:
    """Return the frames and lines at which the names are to be compared next; None where they are not the same statement."""
    if not (mine.is_set and others.is_set):
        return None
    frames, at = (mine.frame, others.frame), (mine.index, others.index)
    if ARGUMENT in at:
        above = frames[0].above, frames[1].above
        if above[0] is None or above[1] is None:
            return None
        frames, at = (above[0], above[1]), (frames[0].above_at, frames[1].above_at)
    inner = tuple(
        next((f for f in reversed(frame.children.get(k, ())) if f.returned == value.text), None)
        for frame, k, value in zip(frames, at, (mine, others), strict=True)
    )
    if inner[0] is not None and inner[1] is not None and inner[0].lines and inner[1].lines:
        frames, at = (inner[0], inner[1]), (len(inner[0].lines) - 1, len(inner[1].lines) - 1)
    if min(at) < 0 or frames[0].file != frames[1].file or frames[0].lines[at[0]] != frames[1].lines[at[1]]:
        return None
    return frames, at


def place(frame: Frame, line: int) -> str:
    """Return 'file:line in function'."""
    return f"{frame.file}:{line} in {frame.name}"


def is_library(file: str) -> bool:
    """Return whether a file belongs to an installed package."""
    return bool({"site-packages", "dist-packages"} & set(PurePath(file).parts))


def side(parting: Parting, which: int) -> str:
    """Return what a rank did at the statement where it parted from another: an outcome that ranks of one side share."""
    frame, at = parting.frames[which], parting.at[which]
    raised = frame.raised.get(at)
    if parting.kind == "exception":
        return f"raised {raised}" if raised else "went on"
    if parting.kind == "argument":
        call = parting.calls[which]
        assert call is not None
        group = f"group {call.group}" if call.group not in ("", "0") else ""
        root = f"root {call.root}" if call.root >= 0 else ""
        return " ".join(filter(None, (call.op, call.what, group, root)))
    if parting.kind == "callee":
        names = ", ".join(dict.fromkeys(f.name for f in frame.children.get(at, ()))) or "no function of the program"
        numbers = Counter(call.op for call in frame.calls.get(at, ()))
        begun = ", ".join(op if n == 1 else f"{op} {n} times" for op, n in numbers.items())
        return f"calls {names}" + (f", which begins {begun}" if begun else "")
    if parting.kind == "value":
        return ", ".join(f"{name} = {text}" for name, text in sorted(frame.values.get(at, {}).items()))
    node = parting.source.statement(parting.line)
    following = frame.lines[at + 1] if at + 1 < len(frame.lines) else None
    is_in_body = (
        following is not None and not isinstance(node, int) and parting.source.is_below(following, node, "body")
    )
    if parting.kind == "loop":
        return "another pass" if is_in_body else LEFT
    if isinstance(node, ast.If):
        return "true" if is_in_body else "false"
    if following is None:
        return "is in it" if frame.is_open else "returned"
    return f"went on at line {following}"
