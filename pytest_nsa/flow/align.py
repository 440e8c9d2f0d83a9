"""Align the control flow of two ranks, to the first statement after which they begin other calls.

Two frames of a function are walked in lockstep, statement by statement. Where they differ, the last common statement is the
candidate. The ranks meet again at the nearest statement behind it that both reach (`Source.meetings`). A difference after which
they meet, with the same calls begun, changes nothing that others see. Where both execute a statement and begin other calls in it,
the frames that it called are aligned.

After execution indexing (Xin, Sumner, Zhang: Efficient program execution indexing, PLDI 2008) and dual slicing (Weeratunge, Zhang,
Sumner, Jagannathan: Analyzing concurrency bugs using dual slicing, ISSTA 2010). The points that must match are the ranks' calls.
"""

import ast
import difflib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from pytest_nsa.flow.read import Call, Flow, Frame
from pytest_nsa.flow.source import END, Source, Statement, read_source

Members = Callable[[str], Sequence[int]]
Key = tuple[object, ...]
COLLECTIVES, MESSAGES, KEYS = frozenset({"collective"}), frozenset({"send", "receive"}), frozenset({"set", "wait"})
_WITH = ast.With | ast.AsyncWith
DEEPEST = 200  # frames, one in the other
_NUMBERS = re.compile(r"\d+")
_SCALAR = re.compile(r"-?[\d.]|['\"]|(?:True|False|None|inf|nan)$")


@dataclass(frozen=True, slots=True)
class Parting:
    """Where two ranks part: a statement of two frames, by the index of its line in each, and how.

    ``kind`` is branch, loop, callee, exception, argument or value. ``calls`` are the first two calls that differ, for an argument.
    """

    kind: str
    frames: tuple[Frame, Frame]
    at: tuple[int, int]
    calls: tuple[Call | None, Call | None] = (None, None)

    @property
    def source(self) -> Source:
        """The file of the statement."""
        return read_source(self.frames[0].file)

    @property
    def line(self) -> int:
        """The statement's line."""
        frame, at = self.frames[0], self.at[0]
        line = frame.lines[at] if 0 <= at < len(frame.lines) else frame.first
        node = self.source.statement(line)
        return node.lineno if isinstance(node, ast.Match) else line

    @property
    def statement(self) -> tuple[str, Statement]:
        """The file, and the statement."""
        return self.frames[0].file, self.source.statement(self.line)


@dataclass(slots=True)
class Pair:
    """Two ranks that are compared. ``members`` returns the ranks of a group by its name.

    ``kinds`` are those of the calls that must match: `COLLECTIVES`, where a rank waits for a message also `MESSAGES`, and for a key
    of a store also `KEYS` (setting one and waiting for one, of names that differ in numbers alone). With ``notes_all``, ``noted``
    has each difference that changed no call: of control flow, and of values that a statement sets. With ``is_owed`` the calls of
    which it returns true must match, and no others.
    """

    one: Flow
    other: Flow
    members: Members
    kinds: frozenset[str] = COLLECTIVES
    notes_all: bool = False
    noted: list[Parting] = field(default_factory=list)
    is_owed: Callable[[Call], bool] | None = None

    def part(self) -> Parting | None:
        """Return where they part; None where they do not, or where it cannot be seen."""
        for mine, others in _matched(self.one.roots, self.other.roots):
            for a, b in zip(mine, others, strict=False):
                found = self.part_frames(a, b)
                if found is not None:
                    return found
        return None

    def shared(self, flow: Flow, calls: Sequence[Call]) -> list[Key]:
        """Return what must be equal of some calls: of those on groups of both ranks, and between the two."""
        return [key for key, _ in self._concerning(flow, calls)]

    def get_key(self, flow: Flow, call: Call) -> Key | None:
        """Return what must be equal of a call; None of one that does not concern the other rank."""
        if self.is_owed is not None:
            return ("owed",) if self.is_owed(call) else None
        other = self.other.rank if flow is self.one else self.one.rank
        if call.kind not in self.kinds:
            return None
        if call.kind in KEYS:
            return ("key", name_key(call))
        if call.kind in MESSAGES:
            return ("message", call.note) if call.peer == other else None
        group = self.members(call.group)
        if group and not {self.one.rank, self.other.rank} <= set(group):
            return None
        return (call.op, call.group if group else "", call.what, call.root)

    def first_inside(self, parting: Parting, which: int) -> Call | None:
        """Return the first call that concerns the other rank and that a rank begins inside the statement where they part."""
        flow, frame = (self.one, self.other)[which], parting.frames[which]
        node = parting.source.statement(parting.line)
        last = node.end_lineno or node.lineno if isinstance(node, ast.stmt) else parting.line
        for k in range(max(0, parting.at[which]), len(frame.lines)):
            if not parting.line <= frame.lines[k] <= last:
                return None
            if begun := self._concerning(flow, frame.calls.get(k, ())):
                return begun[0][1]
        return None

    def _concerning(self, flow: Flow, calls: Sequence[Call]) -> list[tuple[Key, Call]]:
        """Return what must be equal of some calls, each with its call. Messages follow, by tag: they may begin in any order."""
        found = [(key, call) for call in calls if (key := self.get_key(flow, call)) is not None]
        return sorted(found, key=lambda pair: str(pair[0]) if pair[0][0] == "message" else "")

    def part_frames(self, a: Frame, b: Frame, begin: tuple[int, int] = (0, 0), depth: int = 0) -> Parting | None:
        """Return where the ranks part in two frames of one function, from the lines of two indices on."""
        if a.function != b.function or depth > DEEPEST:
            return None
        source = read_source(a.file)
        mine = [source.statement(line) for line in a.lines]
        others = [source.statement(line) for line in b.lines]
        i, j = begin
        while True:
            here, there = _statement(a, mine, i), _statement(b, others, j)
            if (here is None and there is None) or here == END == there:
                return None
            if here == there:
                found = self._in_statement(a, i, b, j, depth)
                if found is not None:
                    # From Python 3.12 on a `with` executes its head once more as an exception leaves it.
                    ends_block = isinstance(here, _WITH) and found.kind == "callee" and found.frames == (a, b)
                    raised = self._parting(source, a, i, b, j) if ends_block else found
                    return raised if raised.kind == "exception" else found
                i, j = i + 1, j + 1
                continue
            # One is still in the statement that the other has finished, or is a generator that was closed.
            if here is None or there is None or 0 in (i, j) or _is_closed(a, i - 1) or _is_closed(b, j - 1):
                return None
            meetings = _list_meetings(source, a, mine, i, b, others, j)
            met = next(meetings, None)
            if met is None and self._are_roles(a, i - 1, b, j - 1):
                return None
            # Ranks that take turns in a loop make the same calls, each in another round: they meet behind the loop.
            while met is not None and not self._began_the_same(a, i - 1, met[0], b, j - 1, met[1]):
                met = next(meetings, None)
            if met is None:
                return self._other_message(a, i, b, j) or self._parting(source, a, i - 1, b, j - 1)
            if self.notes_all:
                self.noted.append(self._parting(source, a, i - 1, b, j - 1))
            i, j = met

    def _in_statement(self, a: Frame, i: int, b: Frame, j: int, depth: int) -> Parting | None:
        """Return where the ranks part inside a statement that both execute: in the frames that it called, or in its calls."""
        mine, others = self.shared(self.one, a.calls.get(i, ())), self.shared(self.other, b.calls.get(j, ()))
        is_last = a.is_open and i + 1 >= len(a.lines), b.is_open and j + 1 >= len(b.lines)
        if self.notes_all:
            self._note_values(a, i, b, j)
        elif mine == others and not any(is_last):
            return None
        different = next((k for k, (x, y) in enumerate(zip(mine, others, strict=False)) if x != y), None)
        # A rank that began more calls before it raised failed in one of them: that follows from the other rank.
        fewer = 0 if len(mine) < len(others) else 1
        raises = len(mine) != len(others) and (i in a.raised, j in b.raised)[fewer]
        found = self._callees(a, i, b, j, depth)
        if raises and different is None and (found is None or (found.kind == "callee" and found.frames[0] is a)):
            return self._raise((a, b), (i, j), fewer)
        calls = (
            (self._call(self.one, a, i, different), self._call(self.other, b, j, different))
            if different is not None else None
        )  # fmt: skip
        is_callee = found is not None and found.kind == "callee" and found.frames[0] is a
        is_message = calls is not None and {call.kind for call in calls} == MESSAGES
        if calls is not None and is_callee and is_message:  # the sender calls other functions than the receiver
            return Parting("argument", (a, b), (i, j), calls)
        if found is not None or mine == others:
            return found
        if calls is not None and (calls[0].place, calls[1].place) == ((a.number, i), (b.number, j)):
            return Parting("argument", (a, b), (i, j), calls)  # else frames below have begun them
        if raises:
            return self._raise((a, b), (i, j), fewer)
        begun = [[c for c in f.calls.get(k, ()) if c.place == (f.number, k)] for f, k in ((a, i), (b, j))]
        # A rank called another one than in its round before; or one of two ranks waits in a group of both.
        in_rounds = self.one is self.other
        if all(begun) and (in_rounds or (all(is_last) and begun[0][-1].group != begun[1][-1].group)):
            return Parting("argument", (a, b), (i, j), (begun[0][-1], begun[1][-1]))
        has_ended = not is_last[len(begun[0]) > len(begun[1])]  # the rank that began fewer calls
        return Parting("callee", (a, b), (i, j)) if len(begun[0]) != len(begun[1]) and has_ended else None

    def _raise(self, frames: tuple[Frame, Frame], at: tuple[int, int], raising: int) -> Parting:
        """Return the innermost statement that raised on the rank of index ``raising``, and not on the other."""
        return Parting("exception", *_innermost_raise(frames, at, raising))

    def _note_values(self, a: Frame, i: int, b: Frame, j: int) -> None:
        """Note a statement that sets a number, a text or a truth value otherwise on the two ranks."""
        if any(x and y and x != y and _SCALAR.match(x) for x, y in list_set_values((a, b), (i, j))):
            self.noted.append(Parting("value", (a, b), (i, j)))

    def _note_returned(self, a: Frame, b: Frame) -> None:
        """Note the line by which a function returned another number, text or truth value."""
        if a.lines and b.lines and a.returned != b.returned and _SCALAR.match(a.returned):
            self.noted.append(Parting("value", (a, b), (len(a.lines) - 1, len(b.lines) - 1)))

    def _call(self, flow: Flow, frame: Frame, index: int, number: int) -> Call:
        return self._concerning(flow, frame.calls[index])[number][1]

    def _callees(self, a: Frame, i: int, b: Frame, j: int, depth: int) -> Parting | None:
        """Return where the ranks part in the frames that a statement called. They are matched by name."""
        mine, others = a.children.get(i, []), b.children.get(j, [])
        a_names, b_names = ([f.function for f in frames] for frames in (mine, others))
        for tag, a0, a1, b0, b1 in difflib.SequenceMatcher(None, a_names, b_names, autojunk=False).get_opcodes():
            if tag == "equal":
                for x, y in zip(mine[a0:a1], others[b0:b1], strict=True):
                    found = self.part_frames(x, y, depth=depth + 1)
                    if found is not None:
                        return found
                    if self.notes_all:
                        self._note_returned(x, y)
            elif (a0 == len(mine) and _is_inside(mine)) or (b0 == len(others) and _is_inside(others)):
                return None  # that rank has not yet come so far
            elif any(self._concerns(self.one, f) for f in mine[a0:a1]) or any(
                self._concerns(self.other, f) for f in others[b0:b1]
            ):
                return Parting("callee", (a, b), (i, j))
        return None

    def _concerns(self, flow: Flow, frame: Frame) -> bool:
        """Return whether a frame began a call that concerns the other rank, or is still in one."""
        return (frame.is_open and not frame.is_paused) or bool(self.shared(flow, frame.list_calls(-1)))

    def _are_roles(self, a: Frame, i: int, b: Frame, j: int) -> bool:
        """Return whether ranks that do not meet again have different parts: each began calls, and those of both fit so far."""
        mine, others = self._list_calls_after(self.one, a, i), self._list_calls_after(self.other, b, j)
        if min(len(mine), len(others)) < 2 or self.is_owed is not None:
            return False
        mine, others = ([c for c in calls if c.kind in COLLECTIVES] for calls in (mine, others))
        return self.shared(self.one, mine) == self.shared(self.other, others)

    def _list_calls_after(self, flow: Flow, frame: Frame, index: int) -> list[Call]:
        before = len(frame.list_calls(-1, index))
        return flow.calls.get(frame.thread, [])[frame.begun_at + before :]

    def _other_message(self, a: Frame, i: int, b: Frame, j: int) -> Parting | None:
        """Return the two ends of a message that differ, in the statements to which the parts of two ranks lead; else None.

        Messages of different tags may begin in any order: an end that has another half does not differ.
        """
        mine, others = [*self._calls_by_line(self.one, a, i)], [*self._calls_by_line(self.other, b, j)]
        numbers, of_other = (
            Counter(call.note for _, call in calls if call.kind in MESSAGES) for calls in (mine, others)
        )
        for (k, call), (m, other) in zip(mine, others, strict=False):
            if self.get_key(self.one, call) != self.get_key(self.other, other):
                if {call.kind, other.kind} != MESSAGES:
                    return None
                if all(numbers[note] != of_other[note] for note in (call.note, other.note)):
                    return Parting("argument", (a, b), (k, m), (call, other))
        return None

    def _calls_by_line(self, flow: Flow, frame: Frame, index: int) -> Iterator[tuple[int, Call]]:
        """Yield the calls that concern the other rank from a line on, each with the index of its line."""
        for k in range(index, len(frame.lines)):
            yield from ((k, call) for _, call in self._concerning(flow, frame.calls.get(k, ())))

    def _began_the_same(self, a: Frame, i: int, i2: int, b: Frame, j: int, j2: int) -> bool:
        """Return whether both began the same shared calls from a statement on until they meet."""
        mine, others = a.list_calls(i, i2), b.list_calls(j, j2)
        return self.shared(self.one, mine) == self.shared(self.other, others)

    def _parting(self, source: Source, a: Frame, i: int, b: Frame, j: int) -> Parting:
        node = source.statement(a.lines[i])
        is_loop = isinstance(node, ast.For | ast.AsyncFor | ast.While)
        ends_a_loop = is_loop and a.raised.get(i, b.raised.get(j, "")).startswith(
            ("StopIteration", "StopAsyncIteration")
        )
        if isinstance(node, _WITH):
            i, j = _raised_inside(node, a, i, b, j)
        if (i in a.raised) != (j in b.raised) and not ends_a_loop:
            return self._raise((a, b), (i, j), 0 if i in a.raised else 1)
        inner = self._in_generators(a, i, b, j) if is_loop else None
        return inner if inner is not None else Parting("loop" if is_loop else "branch", (a, b), (i, j))

    def _in_generators(self, a: Frame, i: int, b: Frame, j: int) -> Parting | None:
        """Return where the generators part that give a loop its values; None where it has none of the program's."""
        mine, others = ([f for f in frame.children.get(k, ()) if f.lines] for frame, k in ((a, i), (b, j)))
        x, y = next(((x, y) for x in mine for y in others if x.function == y.function), (None, None))
        if x is None or y is None:
            return None
        source = read_source(x.file)
        pairs = zip(map(source.statement, x.lines), map(source.statement, y.lines), strict=False)
        same = next((k for k, (here, there) in enumerate(pairs) if here != there), min(len(x.lines), len(y.lines)))
        return self._parting(source, x, same - 1, y, same - 1) if same > 0 and len(x.lines) != len(y.lines) else None


def list_set_values(frames: tuple[Frame, Frame], at: tuple[int, int]) -> list[list[str | None]]:
    """Return, for each name that a line set on one of two ranks, its values on both: the log has a value only where it changes."""
    names = {*frames[0].values.get(at[0], ()), *frames[1].values.get(at[1], ())}
    return [[frame.get_value(k, name) for frame, k in zip(frames, at, strict=True)] for name in sorted(names)]


def name_key(call: Call) -> str:
    """Return the key of a store with its numbers replaced: what keys of different rounds and ranks have in common."""
    return _NUMBERS.sub("#", call.key)


def list_numbers(call: Call) -> list[int]:
    """Return the numbers in the key of a store: of the round, of the rank."""
    return [int(number) for number in _NUMBERS.findall(call.key)]


def _raised_inside(node: ast.With | ast.AsyncWith, a: Frame, i: int, b: Frame, j: int) -> tuple[int, int]:
    """Return the indices of the line inside a ``with`` that raised on one rank: the block's end executes its head again."""
    inside = range(node.lineno + 1, (node.end_lineno or node.lineno) + 1)
    before = [list(_list_back(frame, k, inside)) for frame, k in ((a, i), (b, j))]
    for mine, frame, others, other in ((before[0], a, before[1], b), (before[1], b, before[0], a)):
        raised = next((k for k in mine if k in frame.raised), None)
        there = next((k for k in others if raised is not None and other.lines[k] == frame.lines[raised]), None)
        if raised is not None and there is not None and there not in other.raised:
            return (raised, there) if frame is a else (there, raised)
    return i, j


def _list_back(frame: Frame, index: int, lines: Sequence[int]) -> Iterator[int]:
    """Yield the indices before one, backwards, as long as they are of some lines."""
    return itertools.takewhile(lambda k: frame.lines[k] in lines, range(index - 1, -1, -1))


def _innermost_raise(
    frames: tuple[Frame, Frame], at: tuple[int, int], raising: int
) -> tuple[tuple[Frame, Frame], tuple[int, int]]:
    """Return the innermost statement that raised on the rank of index ``raising``, in the frames that both called."""
    while True:
        mine, others = ([*frames[k].children.get(at[k], ())] for k in (raising, 1 - raising))
        inner = next((f for f in reversed(mine) if f.raised), None)
        like = next((f for f in reversed(others) if inner is not None and f.function == inner.function), None)
        if inner is None or like is None:
            return frames, at
        here = max(inner.raised)
        there = next((k for k, line in enumerate(like.lines) if line == inner.lines[here]), None) if here >= 0 else None
        if there is None or there in like.raised:
            return frames, at
        frames, at = ((inner, like), (here, there)) if raising == 0 else ((like, inner), (there, here))


def _matched(mine: list[Frame], others: list[Frame]) -> list[tuple[list[Frame], list[Frame]]]:
    """Return the outermost frames of the same function and kind of thread, in their order; the first thread first."""
    found: dict[tuple[str, str, int, str], tuple[list[Frame], list[Frame]]] = {}
    for side, frames in enumerate((mine, others)):
        for frame in frames:
            found.setdefault(frame.function, ([], []))[side].append(frame)
    return sorted(found.values(), key=lambda pair: min((f.thread for f in pair[0]), default=1 << 30))


def _is_inside(frames: Sequence[Frame]) -> bool:
    """Return whether a rank is in the last of the frames that a statement called."""
    return bool(frames) and frames[-1].is_open and not frames[-1].is_paused


def _is_closed(frame: Frame, index: int) -> bool:
    """Return whether a generator was closed at a statement: the frame that asked it for values has left it."""
    return frame.raised.get(index, "").startswith("GeneratorExit")


def _statement(frame: Frame, statements: list[Statement], index: int) -> Statement | str | None:
    """Return a frame's statement, its end behind the last one, or None behind the last one of an open frame."""
    if index < len(statements):
        return statements[index]
    return None if frame.is_open else END


def _list_meetings(
    source: Source, a: Frame, mine: list[Statement], i: int, b: Frame, others: list[Statement], j: int
) -> Iterator[tuple[int, int]]:
    """Yield the indices at which two ranks that part behind their statements i - 1 and j - 1 meet again, the first one first."""
    for target, loops in source.meetings(mine[i - 1]):
        here, there = _find(a, mine, i, target, loops), _find(b, others, j, target, loops)
        if here is not None and there is not None:
            yield here, there


def _find(
    frame: Frame, statements: list[Statement], index: int, target: Statement | str, loops: Sequence[object]
) -> int | None:
    """Return the index of the next execution of a statement before another iteration of the loops around it begins."""
    for k in range(index, len(statements)):
        if statements[k] == target:
            return k
        if any(statements[k] is loop for loop in loops):
            return None
    return len(statements) if target == END and not frame.is_open else None
