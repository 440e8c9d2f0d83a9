"""What leads to a call in the source: a condition on the rank or on data, and whether the call is in its body or in its
else.
"""

from __future__ import annotations

import ast
import enum
import itertools
import re
from collections.abc import Iterator, Sequence

from pytest_nsa.diagnosis.explain.program import LEAVES, Frame, list_blocks
from pytest_nsa.evidence.source import Sources, has_line

_RANK = re.compile(r"\brank\b|\.rank\b|get_rank\(\)|\bRANK\b")
# The last name of the whole condition: `trainer.is_main_process`, `is_main_process()`.
_MAIN = re.compile(
    r"(?:^|\.)_?(is_)?(main|master|chief|global_zero|rank_?(0|zero)|coordinator)(_process|_rank|_worker)?(\(\))?$"
)


class Path(enum.Enum):
    """What leads to a call, from the function in which the ranks' stacks diverge."""

    PLAIN = "no condition"
    SELECTS = "a condition that selects these ranks"  # if rank == 0:
    EXCLUDES = "a condition that leaves the other ranks out"  # if rank != 1:
    DATA = "a condition on something else"  # if loss > limit:


def find_path(sources: Sources, frames: Sequence[Frame]) -> Path:
    """Return what leads a rank to its call through ``frames``, outermost first."""
    found = Path.PLAIN
    for frame in frames:
        for test, is_else in _conditions(sources.around(frame.place), frame.line):
            is_not = _is_negative(test) != is_else
            if names_the_rank(test):
                return Path.EXCLUDES if is_not else Path.SELECTS
            found = Path.PLAIN if is_not else Path.DATA
    return found


def names_the_rank(test: ast.expr) -> bool:
    """Return whether a condition tests the rank, in any form."""
    text = ast.unparse(test)
    return bool(_RANK.search(text) or _MAIN.search(text))


def _conditions(statements: Sequence[ast.stmt], line: int) -> Iterator[tuple[ast.expr, bool]]:
    """Yield (condition, negated) for each ``if`` around a line, and for each earlier one that leaves the block, such as
    `if rank == 1: return`.

    ``negated`` is true where the line runs if the condition is false. ``statements`` enclose the line, outermost first.
    """
    for outer, inner in itertools.zip_longest(statements, statements[1:]):
        if isinstance(outer, ast.If):
            for block in (outer.body, outer.orelse):
                if any(has_line(statement, line) for statement in block):
                    yield outer.test, block is outer.orelse
        block = next((b for b in list_blocks(outer) if inner in b), [inner])
        for before in block[: block.index(inner)]:
            if isinstance(before, ast.If) and not before.orelse and isinstance(before.body[-1], LEAVES):
                yield before.test, True


def _is_negative(test: ast.expr) -> bool:
    """Return whether a condition is a negation: ``rank != 1``, ``not (rank == 1 and ...)``, ``not done``.

    Of several that are joined, one of those that name the rank suffices; of others, all must be.
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return not _is_negative(test.operand)
    if isinstance(test, ast.BoolOp):
        of_rank = [_is_negative(part) for part in test.values if names_the_rank(part)]
        return any(of_rank) if of_rank else all(map(_is_negative, test.values))
    return isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.NotEq | ast.NotIn)
