"""What the source says of a line: the loop that it is in, and the condition on the rank that it stands under."""

from __future__ import annotations

import ast
import itertools
import re
from functools import lru_cache
from pathlib import Path

_PLACE = re.compile(r"^(?P<file>.*):(?P<line>\d+) in ")
_RANK = re.compile(r"\brank\b|\.rank\b|get_rank\(\)|\bRANK\b")


@lru_cache(maxsize=64)
def _tree(file: str) -> ast.Module | None:
    try:
        return ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None


@lru_cache(maxsize=512)
def _around(place: str) -> tuple[ast.stmt, ...]:
    """The statements that enclose ``file:line in function``, outermost first; () where the source is not here."""
    match = _PLACE.match(place)
    tree = _tree(match["file"]) if match else None
    if match is None or tree is None:
        return ()
    line = int(match["line"])
    found = [n for n in ast.walk(tree) if isinstance(n, ast.stmt) and n.lineno <= line <= (n.end_lineno or n.lineno)]
    return tuple(sorted(found, key=lambda n: (n.lineno, -(n.end_lineno or n.lineno))))


def _loops(place: str) -> list[ast.For | ast.While]:
    return [statement for statement in _around(place) if isinstance(statement, ast.For | ast.While)]


def calls_nothing(place: str) -> bool:
    """Whether the innermost statement of a line calls no function: then what runs there is Python itself."""
    found = _around(place)
    if not found:
        return False
    innermost = found[-1]
    # Of a compound statement (`while`, `if`) the line has the condition alone.
    tests = [innermost.test] if isinstance(innermost, ast.While | ast.If) else [innermost]
    compound = isinstance(innermost, ast.For | ast.With | ast.Try | ast.FunctionDef)
    return not compound and not any(
        isinstance(node, ast.Call | ast.BinOp) for t in tests for node in ast.walk(t) if _may_be_long(node)
    )


def _may_be_long(node: ast.AST) -> bool:
    """A call, or an operator that a tensor may give a meaning of its own; arithmetic with a literal is none."""
    if isinstance(node, ast.Call):
        return True
    return isinstance(node, ast.BinOp) and not isinstance(node.right, ast.Constant)


def is_past_the_loop(place: str, other: str) -> bool:
    """Whether ``place`` comes after a loop that ``other`` is in, in the same file."""
    a, b = _PLACE.match(place), _PLACE.match(other)
    if a is None or b is None or a["file"] != b["file"]:
        return False
    return any(int(a["line"]) > (loop.end_lineno or 0) for loop in _loops(other))


def is_in_while(place: str) -> bool:
    """Whether a line stands in a ``while``, or is its condition."""
    return any(isinstance(loop, ast.While) for loop in _loops(place))


def is_in_loop(place: str) -> bool:
    """Whether a line stands in a ``for`` or a ``while``."""
    return bool(_loops(place))


def is_here(place: str) -> bool:
    """Whether the source of a line is on this machine: else nobody knows whether it stands in a loop."""
    return bool(_around(place))


def share_a_loop(place: str, other: str) -> bool:
    """Whether one loop has both lines, and neither is past another loop that the other one is in."""
    return any(loop in _loops(other) for loop in _loops(place)) and not is_past_the_loop(place, other)


def are_alternatives(place: str, other: str) -> bool:
    """Whether one line stands in the branch of an ``if`` whose other branch has the other line."""
    a, b = _around(place), _around(other)
    for statement in (n for n in a if isinstance(n, ast.If) and n in b):
        first = next((s for s in statement.body if s in a or s in b), None)
        second = next((s for s in statement.orelse if s in a or s in b), None)
        if first is not None and second is not None:
            return True
    return False


def is_for_a_later_rank(place: str) -> bool:
    """Whether the line stands under a condition that is true on one rank other than the first: ``if rank == 1:``.

    What rank 0 alone does may be all that there is to do, and a call that it makes, one that the others skip.
    """
    statements = _around(place)
    for outer, inner in itertools.pairwise(statements):
        if not isinstance(outer, ast.If) or inner not in outer.body:
            continue
        for test in ast.walk(outer.test):
            text = ast.unparse(test)
            if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq) and _RANK.search(text):
                return not text.endswith("== 0")
    return False
