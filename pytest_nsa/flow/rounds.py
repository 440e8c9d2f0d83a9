"""The round of a loop in which a rank did not do what a wait needs, aligned with the round before.

Who sends and who receives part by right, so two ranks do not show which message is missing. A rank that began such calls in earlier
rounds is compared with itself. So is a rank that waits for its threads, or for what it holds.
"""

import ast
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

from pytest_nsa.flow.align import Members, Pair, Parting
from pytest_nsa.flow.read import Call, Flow, Frame
from pytest_nsa.flow.source import Source, Statement, read_source

# A frame, the index of its line that begins the round (a loop's), and of the line behind its last one. -1: the whole of a function.
Round = tuple[Frame, int, int]
# By the method in which a thread waits, those that end the wait: of a lock, a semaphore, an event, a condition, a queue.
_NOTIFIES = {"set", "notify", "notify_all"}
_ENDED_BY = {"acquire": {"release"}, "wait": _NOTIFIES, "wait_for": _NOTIFIES, "get": {"put", "put_nowait"}}
_ENDS = "ends a wait"


def find_in_rounds(
    flow: Flow, last: Call, is_owed: Callable[[Call], bool], members: Members
) -> tuple[Parting, Pair] | None:
    """Return where a rank's rounds part, the earlier one first; None where no two in a row had more such calls than the next.

    ``last`` is the call before the one that is missing: its round or the next counts, else the one round that had fewer.
    ``is_owed`` returns whether a call is like the missing one.
    """
    pair, others = Pair(flow, flow, members, is_owed=is_owed), []
    for rounds, of_last in _list_series(flow, last):
        numbers = _count_calls(rounds, is_owed)
        short = [n for n in range(2, len(rounds)) if numbers[n] < min(numbers[n - 2 : n])]
        for n in (of_last + 1, of_last):
            if n in short:
                found = _align(pair, rounds[n - 1], rounds[n])
                if found is not None:
                    return found, pair
        if len(short) == 1:  # a round that often has fewer shows nothing
            others.append((rounds[short[0] - 1], rounds[short[0]]))
    found = next(filter(None, (_align(pair, *other) for other in others)), None)
    return None if found is None else (found, pair)


def _list_series(flow: Flow, call: Call) -> Iterator[tuple[list[Round], int]]:
    """Yield rounds in their order, and which of them has a call: those of the loops around it, outermost first, then the
    executions of the functions that led to it, of all threads.
    """
    callers = _list_callers(flow, call)
    for frame, at in callers:
        source = read_source(frame.file)
        statement = source.statement(frame.lines[at])
        for loop in reversed([] if isinstance(statement, int) else source.loops(statement)):
            rounds = _list_rounds(frame, source, loop)
            yield rounds, next((n for n, (_, begin, end) in enumerate(rounds) if begin <= at < end), -2)
    for frame, _ in callers:
        runs = [of for of in flow.frames.values() if of.function == frame.function]
        yield [(of, -1, len(of.lines)) for of in runs], runs.index(frame)


def _count_calls(rounds: list[Round], is_counted: Callable[[Call], bool]) -> list[int]:
    return [sum(map(is_counted, frame.list_calls(begin, end))) for frame, begin, end in rounds]


def _list_callers(flow: Flow, call: Call) -> list[tuple[Frame, int]]:
    """Return the frames that were open as a call began, each with the index of its line, the outermost first."""
    found: list[tuple[Frame, int]] = []
    frame: Frame | None
    frame, at = flow.frames.get(call.place[0]), call.place[1]
    while frame is not None and 0 <= at < len(frame.lines):
        found.append((frame, at))
        at, frame = frame.above_at, frame.above
    return found[::-1]


def _list_rounds(frame: Frame, source: Source, loop: ast.AST) -> list[Round]:
    """Return the executions of a loop's body in a frame. The loop's line is executed once more as the loop ends."""
    heads = [k for k, line in enumerate(frame.lines) if source.statement(line) is loop]
    parts = itertools.pairwise([*heads, len(frame.lines)])
    return [
        (frame, begin, end) for begin, end in parts
        if begin + 1 < end and source.is_below(frame.lines[begin + 1], loop, "body")
    ]  # fmt: skip


def _align(pair: Pair, before: Round, after: Round) -> Parting | None:
    """Return where two rounds part. Each is aligned as the end of a frame that has returned."""
    parts = [
        frame if frame.is_open and end == len(frame.lines) else replace(frame, lines=frame.lines[:end], is_open=False)
        for frame, _, end in (before, after)
    ]
    return pair.part_frames(parts[0], parts[1], (before[1] + 1, after[1] + 1))


def find_unended_wait(flow: Flow, members: Members) -> tuple[Parting, Pair] | None:
    """Return where a rank's rounds part, the earlier one first: in the latest that called less often what would end its wait.

    None where the rank waits in no such method. What the main thread waits for may wait itself. Adds calls to ``flow``.
    """
    for names in _list_ends(flow):
        latest = _note_ends(flow, names)
        found = _find_fewer(flow, members, latest) if latest is not None else None
        if found is not None:
            return found
    return None


def _find_fewer(flow: Flow, members: Members, latest: Call) -> tuple[Parting, Pair] | None:
    """Return the latest round with fewer calls that end a wait than the one before; ``latest`` is the last such call."""
    is_like = functools.partial(_is_like, latest)
    pair = Pair(flow, flow, members, is_owed=is_like)
    for rounds, _ in _list_series(flow, latest):
        numbers = _count_calls(rounds, is_like)
        for n in range(len(rounds) - 1, 0, -1):
            found = _align(pair, rounds[n - 1], rounds[n]) if numbers[n] < numbers[n - 1] else None
            if found is not None:
                return found, pair
    return None


def _is_like(latest: Call, call: Call) -> bool:
    return (call.kind, call.op) == (_ENDS, latest.op)


def _list_ends(flow: Flow) -> list[set[str]]:
    """Return the methods that would end each wait of a rank: of its main thread, of other threads, of coroutines."""
    frames = [f for f in flow.frames.values() if f.is_open and f.lines]
    inner = {f.thread: f for f in frames if not f.is_paused}
    waiting = [*(inner[n] for n in sorted(inner)), *(f for f in frames if f.is_paused)]
    statements = [read_source(f.file).statement(f.lines[-1]) for f in waiting]
    awaited = [n for n, f in zip(statements, waiting, strict=True) if not f.is_paused or _awaits(n)]
    return [ends for n in awaited if (ends := set().union(*(_ENDED_BY.get(name, ()) for name in list_methods(n))))]


def _awaits(statement: Statement) -> bool:
    return isinstance(statement, ast.stmt) and any(isinstance(node, ast.Await) for node in ast.walk(statement))


@functools.cache
def list_methods(statement: Statement) -> set[str]:
    """Return the methods that a statement, without its body, calls."""
    children = ast.iter_child_nodes(statement) if isinstance(statement, ast.stmt) else ()
    parts = [child for child in children if isinstance(child, ast.expr | ast.withitem)]
    calls = (node.func for part in parts for node in ast.walk(part) if isinstance(node, ast.Call))
    by_with = {"acquire"} if any(isinstance(part, ast.withitem) for part in parts) else set()  # of a lock
    return by_with | {function.attr for function in calls if isinstance(function, ast.Attribute)}


def _note_ends(flow: Flow, names: set[str]) -> Call | None:
    """Add a call for each executed statement that calls one of some methods; return the latest, None without any."""
    call = None
    for begun in list(flow.frames.values()) if names else ():
        source = read_source(begun.file)
        for index, line in enumerate(begun.lines):
            if not list_methods(source.statement(line)) & names:
                continue
            call = Call(_ENDS, " ".join(sorted(names)), "", "", -1, -1, "", "", (begun.number, index))
            begun.add_call(index, call)
    return call
