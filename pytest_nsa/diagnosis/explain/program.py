"""Where ranks are in their program, and which of two is ahead: by the lines of their stacks, the loops around them,
their counters.

`compare` walks both stacks from the outermost frame to the first function in which they diverge. There the counters of
the loops around both lines decide first (a range, an enumerate, a variable incremented by hand; never data), then the
order of the statements. Where a loop has no counter, the latest call that both ranks made decides: after it the program
continues downwards, and around the loop at most once.
"""

from __future__ import annotations

import ast
import enum
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pytest_nsa.diagnosis.explain.counters import find_counter, has_made_round, is_first_round
from pytest_nsa.diagnosis.explain.locations import find_line, split_place, user_frames
from pytest_nsa.diagnosis.explain.source import find_loops
from pytest_nsa.evidence.board import Collective
from pytest_nsa.evidence.source import Sources, file_name
from pytest_nsa.evidence.values import RankEvidence

Loop = ast.For | ast.While
# Statements after which the rest of their block does not run.
LEAVES = ast.Return | ast.Raise | ast.Continue | ast.Break
# Files of torch in which a line shows nothing of the program's order.
_MACHINERY = (
    "/torch/distributed/distributed_c10d.py", "/torch/distributed/c10d_logger.py", "/torch/nn/modules/module.py",
    "/torch/autograd/", "/torch/utils/", "/torch/futures/", "/torch/_",
)  # fmt: skip


class Order(enum.Enum):
    """The position of a rank relative to another rank."""

    BEFORE = "before"
    AFTER = "after"
    SAME = "same"
    EXCLUSIVE = "exclusive"  # in two branches: neither rank reaches the other's line in this round
    UNKNOWN = "unknown"

    @property
    def turned(self) -> Order:
        """The order with the two ranks swapped."""
        return {Order.BEFORE: Order.AFTER, Order.AFTER: Order.BEFORE}.get(self, self)


@dataclass(frozen=True, slots=True)
class Frame:
    """A line of a function that a rank is in, with the values of the function's counters."""

    place: str  # 'file:line in function'
    counters: Mapping[str, int]

    @property
    def function(self) -> tuple[str, str]:
        """(file name, function name): call paths have no more than that."""
        file, _, name = split_place(self.place)
        return file_name(file), name

    @property
    def line(self) -> int:
        return split_place(self.place)[1]


Position = tuple[Frame, ...]  # outermost first
Side = tuple[Position, RankEvidence]


@dataclass(frozen=True, slots=True)
class Compared:
    """How two positions compare. ``parted`` are the frames at which the stacks diverge, () where they do not.

    ``left``: the rank that is ahead has left a loop that the other is in.
    """

    order: Order
    parted: tuple[Frame, ...] = ()
    left: bool = False
    is_counted: bool = False  # all shared loops have counters, or there are none
    is_likely: bool = False  # by ``steps``, of which a round may contain several
    is_assumed: bool = False  # one rank may be in a later round of a loop without a counter
    within: tuple[
        Frame, ...
    ] = ()  # the lines of a library's function that show the order, where the user's lines do not


def find_position(rank: RankEvidence, call: Collective) -> Position:
    """Return the position of a rank in a call: by its stack, with counters, where that shows the line of the call; else by
    the call's path, with the counters of the functions that the rank is in while the call has not returned.
    """
    way, stack = tuple(Frame(place, {}) for place in reversed(call.way)), _position_from_stack(rank)
    if any(frame.place == call.site for frame in stack):
        return stack
    if not call.is_inside or not stack:
        return way
    counters = {frame.function: frame.counters for frame in stack}
    return tuple(Frame(frame.place, counters.get(frame.function, {})) for frame in way)


def _position_from_stack(rank: RankEvidence) -> Position:
    """Return the position of a rank by its stack and counters; () where it left no stack."""
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


def find_inner_position(rank: RankEvidence, place: str) -> Position:
    """Return the frames that a user's line of a rank's stack called, with those of libraries, outermost first."""
    frames = list(rank.last_stack.frames) if rank.last_stack is not None else []
    at = next((i for i, frame in enumerate(frames) if frame.describe() == place), 0)
    counted = dict(rank.counters)
    called = (frame.describe() for frame in reversed(frames[:at]) if not frame.is_ours)
    return tuple(Frame(line, counted.get(line, {})) for line in called)


def compare_inner(sources: Sources, found: Compared, one: Side, other: Side) -> Compared:
    """Return the order within the deepest function that two ranks share, where the user's lines are the same or in two branches:
    a library's loop, which one rank has left, for example. Return ``found`` where nothing counted shows an order there.
    """
    positions = []
    for (mine, rank), (theirs, _) in ((one, other), (other, one)):
        shared = tuple(a for a, b in zip(mine, theirs, strict=False) if a.place == b.place)
        last = mine[: len(shared) + (found.order is Order.EXCLUSIVE)]  # two branches may call one function
        if not last:
            return found
        positions.append((*shared, *find_inner_position(rank, last[-1].place)))
    inner = compare(sources, positions[0], positions[1], None)
    if inner.order not in (Order.BEFORE, Order.AFTER) or not inner.is_counted:
        return found
    if any(part in inner.parted[0].place for part in _MACHINERY):
        return found
    return replace(found, order=inner.order, left=inner.left, is_counted=True, is_assumed=False, within=inner.parted)


def compare(
    sources: Sources, one: Position, other: Position, latest: Collective | None,
    go_on: tuple[bool, bool] = (False, False), steps: tuple[int, int] = (0, 0), rounds: tuple[int, int] = (0, 0),
) -> Compared:  # fmt: skip
    """Return the position of ``one`` relative to ``other``.

    ``latest`` is the last call that both ranks made. ``go_on`` has, for each rank, whether its earlier rounds show that
    it has not finished its visit to the statement of its call. ``steps`` are the ranks' training steps, or how many
    of their data loaders were exhausted; they count the rounds of a function or loop that has no counter. ``rounds`` are
    those that each rank has made since ``latest``, as its calls count them.
    """
    one, other = _aligned(one, other)
    around = False  # the ranks' functions are called in a loop without a counter
    for depth, (a, b) in enumerate(itertools.zip_longest(one, other)):
        if a is None or b is None:
            return Compared(Order.SAME, is_counted=not around)
        if a.function != b.function:
            return Compared(Order.UNKNOWN, (a, b), is_counted=not around)
        loops, more, more_there = _loops(sources, a, b)
        decided, is_counted = _by_counters(sources, loops, a, b)
        if decided is not None:
            return Compared(decided, (a, b), is_counted=is_counted)
        if a.line == b.line:
            around = around or not is_counted
            continue
        if not sources.around(a.place) or not sources.around(b.place):
            return Compared(Order.UNKNOWN, (a, b))
        if are_exclusive(sources.around(a.place), sources.around(b.place)):
            return Compared(Order.EXCLUSIVE, (a, b), is_counted=is_counted and not around)
        below: Sequence[bool | None] = (
            _is_first_round(sources, more, one[depth:]),
            _is_first_round(sources, more_there, other[depth:]),
        )
        below = tuple(
            False if first is None and goes_on else first for first, goes_on in zip(below, go_on, strict=True)
        )
        # A loop that the other rank left in a later round than this one's is known to be behind it.
        is_in = bool(more) and not has_made_round(more[0], a.counters, b.counters)
        is_in_there = bool(more_there) and not has_made_round(more_there[0], b.counters, a.counters)
        open_loops = (*([None] if around else ()), *([] if is_counted else loops))
        found = _in_one_function(a, b, open_loops, (is_in, is_in_there), below, latest, rounds)
        is_a_round = around and not loops  # the function is called once in each round of a loop without a counter
        if steps[0] != steps[1] and not (more or more_there) and (is_a_round or found.is_assumed):
            order = Order.AFTER if steps[0] > steps[1] else Order.BEFORE
            return Compared(order, (a, b), is_likely=not is_a_round)
        return found
    return Compared(Order.SAME, is_counted=not around)


def _aligned(one: Position, other: Position) -> tuple[Position, Position]:
    """Return both positions from the outermost function that both have: the dump of a deep stack is cut at its outer
    end.
    """
    if one and other and one[0].function != other[0].function:
        for i, frame in enumerate(other):
            if frame.function == one[0].function:
                return one, other[i:]
        for i, frame in enumerate(one):
            if frame.function == other[0].function:
                return one[i:], other
    return one, other


def _loops(sources: Sources, a: Frame, b: Frame) -> tuple[list[Loop], list[Loop], list[Loop]]:
    """Return the loops around both lines, outermost first, and those around only the one and only the other."""
    mine, others = find_loops(sources, a.place), find_loops(sources, b.place)
    shared = [loop for loop in mine if loop in others]
    return shared, [s for s in mine if s not in shared], [s for s in others if s not in shared]


def _by_counters(sources: Sources, loops: Sequence[Loop], a: Frame, b: Frame) -> tuple[Order | None, bool]:
    """Return the order that the counters of shared loops give, and whether all of these loops have counters."""
    scope = next(iter(sources.around(a.place)), None)
    is_counted = True
    for loop in loops:
        here, there = (find_counter(loop, f.line, f.counters, scope) for f in (a, b))
        if here is None or there is None:
            is_counted = False
        elif here != there:
            return (Order.AFTER if here > there else Order.BEFORE) if is_counted else None, is_counted
    return None, is_counted


def _is_first_round(sources: Sources, loops: Sequence[Loop], frames: Position) -> bool | None:
    """Return whether the outermost loop that a rank is in, within its statement or below it, is in its first round.

    None without such a loop, or where it has no counter.
    """
    for i, frame in enumerate(frames):
        for loop in loops if not i else find_loops(sources, frame.place):
            return is_first_round(loop, frame.counters)
    return None


def is_inside_loop(sources: Sources, position: Position, parted: Frame) -> bool:
    """Return whether a rank is in a loop of a function that was called from the line ``parted`` of its position."""
    at = next((i for i, frame in enumerate(position) if frame is parted or frame == parted), len(position))
    return any(find_loops(sources, frame.place) for frame in position[at + 1 :])


def _in_one_function(
    a: Frame, b: Frame, open_loops: Sequence[Loop | None], in_more: tuple[bool, bool], first_below: Sequence[bool | None],
    latest: Collective | None, rounds: tuple[int, int],
) -> Compared:  # fmt: skip
    """Compare two lines of one function.

    ``open_loops`` are the loops without a counter around both lines; None among them is a loop around the function.
    ``in_more``: whether each rank is in a loop that the other is not in. ``first_below``: `_is_first_round` of each
    rank.
    """
    parted, is_first = (a, b), a.line < b.line
    order, left = Order.BEFORE if is_first else Order.AFTER, in_more[0] if is_first else in_more[1]
    if not open_loops:
        return Compared(order, parted, left, is_counted=True)
    at = find_line(latest, a.place) if latest is not None else 0
    loop = open_loops[-1]
    if not at or (loop is not None and not loop.lineno <= at <= (loop.end_lineno or 0)):
        return Compared(order, parted, left)  # the loop has just begun
    # A rank in the first round of a loop inside the statement has reached the statement again.
    gone_round = [
        frame.line < at if frame.line != at else first for frame, first in zip(parted, first_below, strict=True)
    ]
    # The other rank has left the statement.
    keys = [
        ((gone is not False) + more, frame.line) for gone, frame, more in zip(gone_round, parted, rounds, strict=True)
    ]
    order = Order.BEFORE if keys[0] < keys[1] else Order.AFTER
    return Compared(order, parted, left and keys[0][0] == keys[1][0], is_assumed=None in gone_round)


def are_exclusive(mine: Sequence[ast.stmt], others: Sequence[ast.stmt]) -> bool:
    """Return whether two lines are in two branches of one statement, or one is in a branch that jumps before the other
    line.
    """
    shared = [s for s in mine if s in others]
    if not shared:
        return False
    parent, here, there = shared[-1], *(next((s for s in way if s not in shared), None) for way in (mine, others))
    if here is None or there is None:
        return False
    blocks = [block for block in list_blocks(parent) if here in block or there in block]
    if len(blocks) == 2:
        in_handler = isinstance(parent, ast.Try | ast.TryStar) and parent.finalbody not in blocks
        return isinstance(parent, ast.If | ast.Match) or in_handler
    if len(blocks) != 1:
        return False
    first, inner = (here, mine) if blocks[0].index(here) < blocks[0].index(there) else (there, others)
    return isinstance(first, ast.If) and _ends_branch(first, inner)


def list_blocks(statement: ast.stmt) -> list[list[ast.stmt]]:
    """Return the blocks of a compound statement; [] of any other."""
    found = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
    found += [handler.body for handler in getattr(statement, "handlers", [])]
    return found + [case.body for case in getattr(statement, "cases", [])]


def _ends_branch(statement: ast.If, way: Sequence[ast.stmt]) -> bool:
    """Return whether the branch of an ``if`` that contains a line ends in a jump, so that what follows the ``if`` is
    not reached.
    """
    branch = next((block for block in (statement.body, statement.orelse) if any(s in way for s in block)), [])
    return bool(branch) and isinstance(branch[-1], LEAVES)
