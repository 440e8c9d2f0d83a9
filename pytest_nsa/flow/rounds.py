"""The round of a loop in which a rank did not begin a call that another one awaits, aligned with the round before.

Who sends and who receives part by right, so two ranks do not show which message is missing. A rank that began such calls in earlier
rounds is compared with itself.
"""

import ast
import itertools
from collections.abc import Callable
from dataclasses import replace

from pytest_nsa.flow.align import Members, Pair, Parting
from pytest_nsa.flow.read import Call, Flow, Frame
from pytest_nsa.flow.source import Source, read_source

Round = tuple[int, int]  # the index of the loop's line that begins it, and of the line behind its last one


def find_in_rounds(
    flow: Flow, last: Call, is_owed: Callable[[Call], bool], members: Members
) -> tuple[Parting, Pair] | None:
    """Return where a rank's rounds part, the earlier one first; None where no two in a row had more such calls than the next.

    ``last`` is the call before the one that is missing: its round or the next counts, else the one round that had fewer.
    ``is_owed`` returns whether a call is like the missing one.
    """
    pair, others = Pair(flow, flow, members, is_owed=is_owed), []
    for frame, at in _list_callers(flow, last):
        source = read_source(frame.file)
        statement = source.statement(frame.lines[at])
        for loop in reversed([] if isinstance(statement, int) else source.loops(statement)):
            rounds = _list_rounds(frame, source, loop)
            numbers = [sum(map(is_owed, frame.list_calls(*part))) for part in rounds]
            short = [n for n in range(2, len(rounds)) if numbers[n] < min(numbers[n - 2 : n])]
            of_last = next((n for n, (begin, end) in enumerate(rounds) if begin <= at < end), -2)
            for n in (of_last + 1, of_last):
                if n in short:
                    found = _align(pair, frame, rounds[n - 1], rounds[n])
                    if found is not None:
                        return found, pair
            if len(short) == 1:  # a round that often has fewer shows nothing
                others.append((frame, rounds[short[0] - 1], rounds[short[0]]))
    found = next(filter(None, (_align(pair, *other) for other in others)), None)
    return None if found is None else (found, pair)


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
        (begin, end) for begin, end in parts
        if begin + 1 < end and source.is_below(frame.lines[begin + 1], loop, "body")
    ]  # fmt: skip


def _align(pair: Pair, frame: Frame, before: Round, after: Round) -> Parting | None:
    """Return where two rounds of a frame part. Each is aligned as the end of a frame that has returned."""
    parts = [
        frame if frame.is_open and end == len(frame.lines) else replace(frame, lines=frame.lines[:end], is_open=False)
        for _, end in (before, after)
    ]
    return pair.part_frames(parts[0], parts[1], (before[0] + 1, after[0] + 1))
