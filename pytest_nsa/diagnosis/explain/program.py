"""Where ranks are in their program, and which of two is ahead: by the lines of their stacks, the loops around them, their counters.

`compare` is the one question. It walks both paths from the outermost frame to the first function in which the ranks part. There the
loops around both lines decide first, by their counters (of a range, an enumerate, or a hand-written one; never of data), then the
order of the statements. Where a loop has no counter, the latest call that both ranks have made decides: from its line on, the
program goes down, and round the loop once.
"""

from __future__ import annotations

import ast
import enum
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pytest_nsa.diagnosis.explain.counters import counter_of, has_made_round, is_first_round
from pytest_nsa.diagnosis.explain.locations import line_in, parts_of, user_frames
from pytest_nsa.evidence.board import Collective
from pytest_nsa.evidence.source import Sources, file_name
from pytest_nsa.evidence.values import RankEvidence

Loop = ast.For | ast.While


class Order(enum.Enum):
    """Where a rank is, seen from another one."""

    BEFORE = "before"
    AFTER = "after"
    SAME = "same"
    EXCLUSIVE = "exclusive"  # in two branches: neither comes to the other's line in this round
    UNKNOWN = "unknown"

    @property
    def turned(self) -> Order:
        """Seen from the other rank."""
        return {Order.BEFORE: Order.AFTER, Order.AFTER: Order.BEFORE}.get(self, self)


@dataclass(frozen=True, slots=True)
class Frame:
    """A line of a function that a rank is in, with the values of the function's counters."""

    place: str  # 'file:line in function'
    counters: Mapping[str, int]

    @property
    def function(self) -> tuple[str, str]:
        """The file's name and the function's: the lines that led to a call have no more."""
        file, _, name = parts_of(self.place)
        return file_name(file), name

    @property
    def line(self) -> int:
        return parts_of(self.place)[1]


Position = tuple[Frame, ...]  # outermost first


@dataclass(frozen=True, slots=True)
class Compared:
    """How two positions lie, and where they part: the frames of the function in which their lines differ, () without one.

    ``left``: the rank that is ahead has left a loop that the other is in.
    """

    order: Order
    parted: tuple[Frame, ...] = ()
    left: bool = False
    is_counted: bool = False  # by counters of all shared loops, or in no loop
    is_likely: bool = False  # by the steps of the ranks' training, of which one may have made more in a round
    is_assumed: bool = False  # it may be that one is in a further round of a loop that nothing counts


def position_of(rank: RankEvidence, call: Collective) -> Position:
    """Return where a rank is in a call: by its stack, with the counters that it wrote, while it is at the line of the call; else by
    the lines that led there, without counters.
    """
    way = tuple(Frame(place, {}) for place in reversed(call.way))
    if not call.is_inside and all(frame.describe() != call.site for frame in user_frames(rank)):
        return way  # it went on since
    return _of_stack(rank) or way


def _of_stack(rank: RankEvidence) -> Position:
    """Return where a rank is by its stack, with the counters that it wrote; () where it left none."""
    counted = [(place, dict(values)) for place, values in rank.counters]
    found = []
    for frame in user_frames(rank):
        place = frame.describe()
        at = next((i for i, (known, _) in enumerate(counted) if known == place), None)
        values = counted[at][1] if at is not None else {}
        if at is not None:
            del counted[: at + 1]
        found.append(Frame(place, values))
    return tuple(found)


def compare_ranks(sources: Sources, one: RankEvidence, other: RankEvidence) -> Compared:
    """Return where one rank is from another one, by their stacks and counters alone."""
    return compare(sources, _of_stack(one), _of_stack(other), None, steps=(_steps(one), _steps(other)))


def _steps(rank: RankEvidence) -> int:
    return int(rank.board.numbers["step"]) if rank.board is not None else 0


# What calls the user's code at the line that it is called from, once.
_PLAIN_CALLERS = (
    "torch/nn/modules/module.py",
    "/contextlib.py",
    "/functools.py",
    "torch/utils/_contextlib.py",
    "torch/autograd/function.py",
)


def is_called_back(rank: RankEvidence, place: str) -> bool:
    """Return whether a library has called the function that a rank is in, below the line ``place``, or the interpreter has: a hook,
    a signal's handler, a finalizer. The line around it does not tell then where in the program it lies.
    """
    stack = rank.last_stack
    frames = [f for f in (stack.frames if stack is not None else ()) if not f.is_ours]
    last = next((i for i, frame in enumerate(frames) if frame.describe() == place), -1)
    first = next((i for i, frame in enumerate(frames) if frame.is_user), 0)
    between = [f for f in frames[first:last] if not f.is_user]
    if any(not any(part in f.file for part in _PLAIN_CALLERS) for f in between):
        return True
    return any(
        inner.is_user and outer.is_user and inner.function.isidentifier() and not inner.function.startswith("__")
        and not _may_call(rank.sources, outer.describe(), inner.function)
        for inner, outer in itertools.pairwise(frames[first : last + 1])
    )  # fmt: skip


# Where a program gives a function to what calls it at any line.
_REGISTERS = r"(signal\.signal|add_signal_handler|atexit\.register|weakref\.finalize)\([^\n]*\b{name}\b"


def _may_call(sources: Sources, place: str, function: str) -> bool:
    """Return whether the statement of a line may call a function: it makes a call, and the program does not give the function to
    what calls it at any line. True where the source is not kept.
    """
    found = sources.around(place)
    registers = re.compile(_REGISTERS.format(name=re.escape(function)))
    if any(registers.search(snippet.text) for snippet in sources.snippets):
        return function in ast.unparse(found[-1]) if found else False
    if not found:
        return True
    own = [
        n
        for n in ast.walk(found[-1])
        if isinstance(n, ast.Call | ast.With | ast.For | ast.Attribute | ast.Subscript | ast.BinOp)
    ]
    return bool(own) or function in ast.unparse(found[-1])


def compare(
    sources: Sources, one: Position, other: Position, latest: Collective | None,
    go_on: tuple[bool, bool] = (False, False), steps: tuple[int, int] = (0, 0),
) -> Compared:  # fmt: skip
    """Return where ``one`` lies from ``other``. ``latest`` is the last call that both ranks have made; ``go_on``: whether the
    rounds of each rank show that its visit to the statement of its call had not come to its usual end; ``steps``: of each rank's
    training, which count the rounds that nothing else counts: of the function, or of a loop in it.
    """
    one, other = _aligned(one, other)
    around = False  # of a loop that nothing counts, around the functions in which the ranks are
    for depth, (a, b) in enumerate(itertools.zip_longest(one, other)):
        if a is None or b is None:
            return Compared(Order.SAME)
        if a.function != b.function:
            return Compared(Order.UNKNOWN, (a, b))
        loops, more, more_there = _loops(sources, a, b)
        decided, is_counted = _by_counters(sources, loops, a, b)
        if decided is not None:
            return Compared(decided, (a, b), is_counted=is_counted)
        if a.line == b.line:
            around = around or not is_counted
            continue
        if not sources.around(a.place) or not sources.around(b.place):
            return Compared(Order.UNKNOWN, (a, b))
        if _are_exclusive(sources.around(a.place), sources.around(b.place)):
            return Compared(Order.EXCLUSIVE, (a, b))
        below: Sequence[bool | None] = (
            _first_round_below(sources, more, one[depth:]),
            _first_round_below(sources, more_there, other[depth:]),
        )
        below = tuple(
            False if first is None and goes_on else first for first, goes_on in zip(below, go_on, strict=True)
        )
        # A loop that the other rank has left, after the round that this one is in, hides nothing.
        is_in = bool(more) and not has_made_round(more[0], a.counters, b.counters)
        is_in_there = bool(more_there) and not has_made_round(more_there[0], b.counters, a.counters)
        open_loops = (*([None] if around else ()), *([] if is_counted else loops))
        found = _in_one_function(a, b, open_loops, (is_in, is_in_there), below, latest)
        is_a_round = around and not loops  # the function is called once a round of a loop that nothing counts
        if steps[0] != steps[1] and not (more or more_there) and (is_a_round or found.is_assumed):
            order = Order.AFTER if steps[0] > steps[1] else Order.BEFORE
            return Compared(order, (a, b), is_likely=not is_a_round)
        return found
    return Compared(Order.SAME)


def _aligned(one: Position, other: Position) -> tuple[Position, Position]:
    """Return both from the outermost function that both have: a dump of a deep stack is cut off at its outer end."""
    if one and other and one[0].function != other[0].function:
        for i, frame in enumerate(other):
            if frame.function == one[0].function:
                return one, other[i:]
        for i, frame in enumerate(one):
            if frame.function == other[0].function:
                return one[i:], other
    return one, other


def _loops(sources: Sources, a: Frame, b: Frame) -> tuple[list[Loop], list[Loop], list[Loop]]:
    """Return the loops around both lines, outermost first, and those around the one and around the other alone."""
    mine = [s for s in sources.around(a.place) if isinstance(s, Loop)]
    others = [s for s in sources.around(b.place) if isinstance(s, Loop)]
    shared = [loop for loop in mine if loop in others]
    return shared, [s for s in mine if s not in shared], [s for s in others if s not in shared]


def _by_counters(sources: Sources, loops: Sequence[Loop], a: Frame, b: Frame) -> tuple[Order | None, bool]:
    """Return what the counters of shared loops decide, and whether all of them count."""
    scope = next(iter(sources.around(a.place)), None)
    is_counted = True
    for loop in loops:
        here, there = (counter_of(loop, f.line, f.counters, scope) for f in (a, b))
        if here is None or there is None:
            is_counted = False
        elif here != there:
            return (Order.AFTER if here > there else Order.BEFORE) if is_counted else None, is_counted
    return None, is_counted


def _first_round_below(sources: Sources, loops: Sequence[Loop], frames: Position) -> bool | None:
    """Return whether the outermost loop that a rank is in, of those in its statement and below it, is in its first round.

    None where there is none, or it has no counter.
    """
    for i, frame in enumerate(frames):
        for loop in loops if not i else [s for s in sources.around(frame.place) if isinstance(s, Loop)]:
            return is_first_round(loop, frame.counters)
    return None


def is_in_loop_below(sources: Sources, position: Position, parted: Frame) -> bool:
    """Return whether a rank is in a loop of a function that the line ``parted`` of its position has called."""
    at = next((i for i, frame in enumerate(position) if frame is parted or frame == parted), len(position))
    return any(isinstance(s, Loop) for frame in position[at + 1 :] for s in sources.around(frame.place))


def _in_one_function(
    a: Frame, b: Frame, open_loops: Sequence[Loop | None], in_more: tuple[bool, bool], first_below: Sequence[bool | None],
    latest: Collective | None,
) -> Compared:  # fmt: skip
    """Compare two lines of one function.

    ``open_loops`` are around both, and count nothing; None stands for one around the function. ``in_more``: whether each is in a
    loop that the other is not in; ``first_below``: `_first_round_below` of each.
    """
    parted, is_first = (a, b), a.line < b.line
    order, left = Order.BEFORE if is_first else Order.AFTER, in_more[0] if is_first else in_more[1]
    if not open_loops:
        return Compared(order, parted, left, is_counted=True)
    at = line_in(latest, a.place) if latest is not None else 0
    loop = open_loops[-1]
    if not at or (loop is not None and not loop.lineno <= at <= (loop.end_lineno or 0)):
        return Compared(order, parted, left)  # the loop has just begun
    # In its own statement, a rank whose loop there is in its first round has come to it again.
    gone_round = [
        frame.line < at if frame.line != at else first for frame, first in zip(parted, first_below, strict=True)
    ]
    # The other one has left the statement: of two that is the one which has gone on in it, or come to it again.
    keys = [(gone is not False, frame.line) for gone, frame in zip(gone_round, parted, strict=True)]
    order = Order.BEFORE if keys[0] < keys[1] else Order.AFTER
    return Compared(order, parted, left and keys[0][0] == keys[1][0], is_assumed=None in gone_round)


def _are_exclusive(mine: Sequence[ast.stmt], others: Sequence[ast.stmt]) -> bool:
    """Return whether two lines are in two branches of one statement, or the one in a branch that ends before the other line."""
    shared = [s for s in mine if s in others]
    if not shared:
        return False
    parent, here, there = shared[-1], *(next((s for s in way if s not in shared), None) for way in (mine, others))
    if here is None or there is None:
        return False
    blocks = [block for block in _blocks(parent) if here in block or there in block]
    if len(blocks) == 2:
        return isinstance(parent, ast.If | ast.Match) or _is_a_handler(parent, blocks)
    if len(blocks) != 1:
        return False
    first, inner = (here, mine) if blocks[0].index(here) < blocks[0].index(there) else (there, others)
    return isinstance(first, ast.If) and _ends_in(first, inner)


def _is_a_handler(parent: ast.stmt, blocks: list[list[ast.stmt]]) -> bool:
    return isinstance(parent, ast.Try | ast.TryStar) and parent.finalbody not in blocks


def _blocks(statement: ast.stmt) -> list[list[ast.stmt]]:
    found = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
    found += [handler.body for handler in getattr(statement, "handlers", [])]
    return found + [case.body for case in getattr(statement, "cases", [])]


def _ends_in(statement: ast.If, way: Sequence[ast.stmt]) -> bool:
    """Return whether the branch of an ``if`` that a way leads through ends in a jump: it does not come to what follows."""
    branch = next((block for block in (statement.body, statement.orelse) if any(s in way for s in block)), [])
    return bool(branch) and isinstance(branch[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)
