"""Whether a condition in the source names the rank, and whether two lines are alternatives of one condition."""

from __future__ import annotations

import ast
import itertools
import re

from pytest_nsa.evidence.source import Sources

_RANK = re.compile(r"\brank\b|\.rank\b|get_rank\(\)|\bRANK\b")
_MAIN = re.compile(r"_?(is_)?(main|master|chief|global_zero|rank_?(0|zero)|coordinator)(_process|_rank|_worker)?")


def names_the_rank(test: ast.expr) -> bool:
    """Return whether a condition tests the rank, in any form."""
    return bool(_RANK.search(ast.unparse(test)) or _MAIN.fullmatch(_last_name(test)))


def are_alternatives(sources: Sources, place: str, other: str) -> bool:
    """Return whether two lines are alternatives: in the two branches of one ``if``, or one in a branch that returns and
    the other after it, or under a second ``if`` with the same condition.
    """
    a, b = sources.around(place), sources.around(other)
    for statement in (n for n in a if isinstance(n, ast.If) and n in b):
        first = next((s for s in statement.body if s in a or s in b), None)
        second = next((s for s in statement.orelse if s in a or s in b), None)
        if first is not None and second is not None:
            return True
    return _returns_before(a, b) or _returns_before(b, a)


def _returns_before(a: tuple[ast.stmt, ...], b: tuple[ast.stmt, ...]) -> bool:
    """Return whether ``a`` is in an ``if`` that ends in a return, and ``b`` follows it in the same block."""
    for outer, inner in itertools.pairwise(a):
        block = getattr(outer, "body", [])
        if not isinstance(inner, ast.If) or inner not in block or not any(s in inner.body for s in a) or outer not in b:
            continue
        behind = block[block.index(inner) :]
        returns = next((i for i, s in enumerate(behind) if _returns_if(inner.test, s)), len(behind))
        if any(statement in behind[returns + 1 :] for statement in b):
            return True
    return False


def _returns_if(test: ast.expr, statement: ast.stmt) -> bool:
    """Return whether a statement is an ``if`` on this condition that ends in a return."""
    if not isinstance(statement, ast.If) or ast.unparse(statement.test) != ast.unparse(test):
        return False
    return isinstance(statement.body[-1], ast.Return | ast.Raise)


def block_of(outer: ast.stmt, inner: ast.stmt) -> list[ast.stmt]:
    """Return the list of statements in ``statement`` that contains ``inner``."""
    return next((b for b in (getattr(outer, n, []) for n in ("body", "orelse")) if inner in b), [])


def _last_name(node: ast.expr) -> str:
    """Return the last name of an expression: 'is_main_process' for ``trainer.is_main_process`` and
    ``is_main_process()``.
    """
    node = node.func if isinstance(node, ast.Call) and not node.args else node
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
