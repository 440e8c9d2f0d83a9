"""The values by which a statement decided otherwise on two ranks, and the lines that set them, backwards."""

import ast
import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from nsa.trace.flow.statements import chain_of, chains
from pytest_nsa.flow.align import KEYS, MESSAGES, Parting
from pytest_nsa.flow.read import Flow, Frame
from pytest_nsa.flow.source import Statement, read_source

MOST_STEPS = 4
LEFT = "left the loop"
RAISED = "raised "
BY_RANK = "the rank"
ARGUMENT = -1  # the index at which arguments are set
RANK = re.compile(r"(?:^|[._])rank$")
# What may differ from rank to rank by right, by the names in a statement.
_BY_RIGHT = {
    BY_RANK: re.compile(r"(?i)(?<![a-z])ranks?(?![a-z])|world_size"),  # not 'ranking'
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

    @property
    def verb(self) -> str:
        """What the statement does to the value."""
        return "is decided" if self.statement.startswith(("if ", "elif ", "while ", "for ", "match ")) else "is set"


_IN_A_LINE = ("<lambda>", "<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>")  # functions without a statement
_LONG = re.compile(r"-?\d+\.\d{6,}(e[-+]\d+)?")  # a number with more digits than a reader needs


def shorten(text: str) -> str:
    """Return a value's text with at most six digits a number."""
    return _LONG.sub(lambda number: f"{float(number[0]):.6g}", text)


@dataclass(frozen=True, slots=True)
class _Value:
    """A value of a name, and where it was set: a frame and the index of the line; `ARGUMENT` for an argument."""

    text: str
    frame: Frame
    index: int
    is_set: bool


def differing(parting: Parting, flows: tuple[Flow, Flow]) -> dict[str, tuple[str, str]]:
    """Return the names that a statement reads and that differ, with the text of each on the two ranks."""
    found, places = {}, _list_evaluated(parting)
    for name in _names(parting.source.statement(parting.line)):
        mine, others = (_value(of, f, at, name) for of, f, at in zip(flows, parting.frames, places, strict=True))
        if mine is not None and others is not None and mine.text != others.text:
            found[name] = mine.text, others.text
    return found


def _list_evaluated(parting: Parting) -> tuple[int, int]:
    """Return the indices at which the statement's names were read: a for loop reads them as it begins."""
    loop = parting.source.statement(parting.line)
    if not isinstance(loop, ast.For | ast.AsyncFor):
        return parting.at
    first, last = loop.lineno, loop.end_lineno or loop.lineno
    begins = []
    for frame, begin in zip(parting.frames, parting.at, strict=True):
        while begin > 0 and first <= frame.lines[begin - 1] <= last:
            begin -= 1
        begins.append(begin)
    return begins[0], begins[1]


def trace_back(parting: Parting, flows: tuple[Flow, Flow], list_earlier: Callable[[], Sequence[Parting]]) -> list[Step]:
    """Return the values that differ at a statement, and the lines that set them, at most `MOST_STEPS` one behind the other.

    ``list_earlier`` returns the differences that changed no call. One of them explains a container that differs and that no line
    set. They take an alignment, so they are looked up where one is needed.
    """
    list_earlier = functools.cache(list_earlier)
    found: list[Step] = []
    seen: set[tuple[str, str, int]] = set()
    todo = [(parting.frames, _list_evaluated(parting), 0)]
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
            is_known = mine.is_set and others.is_set and _is_one_line(mine, others)
            earlier = None if is_known else next((p for p in reversed(list_earlier()) if _touches(p, name)), None)
            if earlier is not None:
                frame = earlier.frames[0]
                found[-1] = replace(
                    found[-1], where=place(frame, earlier.line), statement=earlier.source.head(earlier.line)
                )
                todo.append((earlier.frames, earlier.at, depth + 1))
                continue
            mine, others = _before_steps(mine, name), _before_steps(others, name)
            if mine.text != others.text and found[-1] != (begun := _step(name, mine, others)):
                found.append(begun)
            following = _following(mine, others)
            if following is None:
                continue
            inside, at_next = following
            is_callee = inside[0] not in (mine.frame, mine.frame.above)
            if found[-1].by_right and not is_callee:
                continue
            if is_callee and _decides(inside, at_next):
                values = tuple(_Value(f.returned, f, k, is_set=True) for f, k in zip(inside, at_next, strict=True))
                found.append(_step(f"{inside[0].name}()", *values))
            todo.append((inside, at_next, depth + 1))
    return list(dict.fromkeys(found))


def _touches(parting: Parting, name: str) -> bool:
    """Return whether one side of a branch or loop executes statements that use a name, itself or in a function that it calls."""
    node, last = parting.source.statement(parting.line), name.rpartition(".")[2]
    if parting.kind not in ("branch", "loop") or not isinstance(node, ast.stmt):
        return False
    lines: list[tuple[str, int]] = []
    for frame, at in zip(parting.frames, parting.at, strict=True):
        for k in range(at + 1, len(frame.lines)):
            if not node.lineno < frame.lines[k] <= (node.end_lineno or node.lineno):
                break
            lines += [(frame.file, frame.lines[k])]
            lines += [(child.file, line) for child in frame.children.get(k, ()) for line in child.lines]
    statements = [read_source(file).statement(line) for file, line in set(lines)]
    used = itertools.chain(*map(_names, statements), *map(_targets, statements))
    return any(chain.rpartition(".")[2] == last or f".{last}." in f".{chain}." for chain in used)


def _returned_by_calls(frames: tuple[Frame, Frame], at: tuple[int, int]) -> tuple[str, _Value, _Value] | None:
    """Return the function that a line called and that returned other values on the two ranks, with the lines that returned them."""
    pairs = zip(*(frame.children.get(k, ()) for frame, k in zip(frames, at, strict=True)), strict=False)
    for mine, others in pairs:
        has_returned = not (mine.is_open or others.is_open)
        if has_returned and mine.function == others.function and mine.returned != others.returned:
            decided = _decided_return(mine, others)
            if decided is not None:
                values = (_Value(f.returned, f, k, is_set=True) for f, k in zip((mine, others), decided, strict=True))
                return (f"{mine.name}()", *values)  # type: ignore[return-value]
    return None


def _decides(frames: tuple[Frame, Frame], at: tuple[int, int]) -> bool:
    """Return whether functions that have returned did so at different lines behind a statement."""
    return (
        all(k + 1 < len(f.lines) for f, k in zip(frames, at, strict=True))
        and frames[0].lines[-1] != frames[1].lines[-1]
    )


def _decided_return(a: Frame, b: Frame) -> tuple[int, int] | None:
    """Return the lines that decided what a function returned: its last one, or the last common one before different lines."""
    if not a.lines or not b.lines:
        return None
    if a.lines[-1] == b.lines[-1]:
        return len(a.lines) - 1, len(b.lines) - 1
    source = read_source(a.file)
    pairs = zip(map(source.statement, a.lines), map(source.statement, b.lines), strict=False)
    same = next((k for k, (here, there) in enumerate(pairs) if here != there), 0)
    return (same - 1, same - 1) if same else None


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
    return sorted({name for part in parts for name in chains(part)}, key=lambda name: (-name.count("."), name))


def _targets(statement: Statement) -> list[str]:
    """Return the names and attributes that a statement sets, without its body."""
    match statement:
        case ast.Assign():
            targets = statement.targets
        case ast.AnnAssign() | ast.AugAssign() | ast.For() | ast.AsyncFor():
            targets = [statement.target]
        case ast.With() | ast.AsyncWith():
            targets = [item.optional_vars for item in statement.items if item.optional_vars]
        case _:
            targets = []
    return [name for target in targets for name in _list_set(target)]


def _list_set(target: ast.expr) -> list[str]:
    """Return the names and attributes that are set in a target. Setting an attribute does not set its object."""
    if isinstance(target, ast.Tuple | ast.List):
        return [name for part in target.elts for name in _list_set(part)]
    return list(filter(None, [chain_of(target)])) if isinstance(target, ast.Attribute) else list(chains(target))


def _value(flow: Flow, frame: Frame, at: int, name: str) -> _Value | None:
    """Return the value that a name had in a frame at the line of an index: as the line read it, or as it was set before."""
    for index in range(at, ARGUMENT - 1, -1):
        read = frame.reads.get(index, {}).get(name)
        if read is not None:
            return _Value(read, frame, index, is_set=False)
        held = frame.values.get(index, {}).get(name) if index < at or index == ARGUMENT else None
        if held is not None:
            return _Value(held, frame, index, is_set=True)
    if "." not in name:
        return _value_read_later(frame, at, name)
    if not 0 <= at < len(frame.sets_at):
        return None
    last = "." + name.rpartition(".")[2]  # an attribute, which another function may have set
    found = next((s for s in reversed(flow.sets[: frame.sets_at[at]]) if s[0].endswith(last)), None)
    return None if found is None else _Value(found[1], found[2], found[3], is_set=True)


def _value_read_later(frame: Frame, at: int, name: str) -> _Value | None:
    """Return the value of a name that no line sets before it is read again, or that the line returns."""
    source = read_source(frame.file)
    for index in range(max(at, 0), len(frame.lines)):
        statement = source.statement(frame.lines[index])
        if isinstance(statement, ast.Return) and isinstance(statement.value, ast.Name) and statement.value.id == name:
            return None if frame.is_open else _Value(frame.returned, frame, index, is_set=False)
        if name in frame.reads.get(index, ()):
            return _Value(frame.reads[index][name], frame, index, is_set=False)
        if name in _targets(statement):
            break
    return None


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
    # The value of a tensor or another object is not recorded where it is set.
    source = read_source(frame.file)
    sets = (k for k in range(value.index - 1, -1, -1) if name in _targets(source.statement(frame.lines[k])))
    index = next(sets, ARGUMENT)
    return value if index == ARGUMENT and not _is_argument(frame, name) else replace(value, index=index, is_set=True)


def _is_argument(frame: Frame, name: str) -> bool:
    """Return whether the caller of a function gave it a name's value, or the line of a comprehension did."""
    function = read_source(frame.file).statement(frame.first)
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        return frame.name in _IN_A_LINE
    return name in {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}


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


def _place(value: _Value) -> tuple[Frame, int]:
    """Return the frame and line that set a value: those of the call, for an argument."""
    frame, index = value.frame, value.index
    if index == ARGUMENT and frame.above is not None:
        frame, index = frame.above, frame.above_at
    return frame, frame.lines[index] if 0 <= index < len(frame.lines) else frame.first


def _is_one_line(mine: _Value, others: _Value) -> bool:
    (a, line), (b, other) = _place(mine), _place(others)
    return (a.file, line) == (b.file, other)


def reads_rank_alone(statement: str) -> bool:
    """Return whether a statement reads the number of a rank, and nothing else: it gives each rank its part."""
    try:
        names = set(chains(ast.parse(f"{statement.removeprefix('el')} pass")))
    except SyntaxError:
        return False
    whole = [name for name in names if not any(other.startswith(f"{name}.") for other in names)]
    return bool(whole) and all(map(RANK.search, whole))


def _step(name: str, mine: _Value, others: _Value) -> Step:
    if not mine.is_set:
        return Step(name, (mine.text, others.text), "", "", BY_RANK if RANK.search(name) else "")
    frame, line = _place(mine)
    source = read_source(frame.file)
    text, node = source.head(line), source.statement(line)
    value = node.value if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) else None
    read = ast.unparse(value) if value is not None else text
    by_right = next((what for what, names in _BY_RIGHT.items() if names.search(read)), "")
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
    a, b = (
        next((f for f in reversed(frame.children.get(k, ())) if f.returned == value.text), None)
        for frame, k, value in zip(frames, at, (mine, others), strict=True)
    )
    if a is not None and b is not None and (decided := _decided_return(a, b)) is not None:
        frames, at = (a, b), decided
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
        return f"{RAISED}{raised}" if raised else "went on"
    if parting.kind == "argument":
        call = parting.calls[which]
        assert call is not None
        if call.kind in KEYS:
            return f"{'sets' if call.kind == 'set' else 'waits for'} {call.key}"
        group = f"group {call.group}" if call.group not in ("", "0", call.op) else ""
        root = f"root {call.root}" if call.root >= 0 else ""
        tag = call.note if call.kind in MESSAGES else ""
        details = ", ".join(filter(None, (call.what, group, root, tag)))
        return f"begins {call.op}" + (f" ({details})" if details else "")
    if parting.kind == "callee":
        names = ", ".join(dict.fromkeys(f.name for f in frame.children.get(at, ())))
        numbers = Counter(call.op for call in frame.calls.get(at, ()))
        begun = ", ".join(op if n == 1 else f"{op} {n} times" for op, n in numbers.items())
        if not names:
            return f"begins {begun or 'no call'}"
        return f"calls {names}" + (f", which begins {begun}" if begun else "")
    if parting.kind == "value":
        found = ", ".join(f"{name} = {text}" for name, text in sorted(frame.values.get(at, {}).items()))
        return found or f"returns {frame.returned}"
    node = parting.source.statement(parting.line)
    following = frame.lines[at + 1] if at + 1 < len(frame.lines) else None
    is_in_body = (
        following is not None and not isinstance(node, int) and parting.source.is_below(following, node, "body")
    )
    if parting.kind == "loop":  # a loop of one line has its body there
        return "another pass" if is_in_body or following == frame.lines[at] else LEFT
    if isinstance(node, ast.If) and node.body[0].lineno > node.lineno:
        return "true" if is_in_body else "false"
    if following is None:
        return "is in it" if frame.is_open else "returned"
    return f"continues at line {following}"
