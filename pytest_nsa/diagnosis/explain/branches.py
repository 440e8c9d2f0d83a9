"""What conditions in a line's source tell: which rank it is for, what it is an alternative to, what may leave it out."""

from __future__ import annotations

import ast
import itertools
import re

from pytest_nsa.evidence.source import Sources

_RANK = re.compile(r"\brank\b|\.rank\b|get_rank\(\)|\bRANK\b")
_ITS_RANK = re.compile(r"_?(\w+_)?rank")
_MAIN = re.compile(r"_?(is_)?(main|master|chief|global_zero|rank_?(0|zero)|coordinator)(_process|_rank|_worker)?")


def names_the_rank(test: ast.expr) -> bool:
    """Return whether a condition is one on the rank, of whatever form."""
    return bool(_RANK.search(ast.unparse(test)) or _MAIN.fullmatch(_last_name(test)))


def are_alternatives(sources: Sources, place: str, other: str) -> bool:
    """Return whether one line is in the branch of an ``if`` whose other branch has the other line: or what follows it, where the
    first returns, or an ``if`` behind it with the same condition does.
    """
    a, b = sources.around(place), sources.around(other)
    for statement in (n for n in a if isinstance(n, ast.If) and n in b):
        first = next((s for s in statement.body if s in a or s in b), None)
        second = next((s for s in statement.orelse if s in a or s in b), None)
        if first is not None and second is not None:
            return True
    return _returns_before(a, b) or _returns_before(b, a)


def _returns_before(a: tuple[ast.stmt, ...], b: tuple[ast.stmt, ...]) -> bool:
    """Return whether ``a`` is in an ``if`` that ends in a return, and ``b`` behind it in the same block."""
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
    """Return whether a statement is an ``if`` with this condition that ends in a return."""
    if not isinstance(statement, ast.If) or ast.unparse(statement.test) != ast.unparse(test):
        return False
    return isinstance(statement.body[-1], ast.Return | ast.Raise)


def is_for_one_rank(sources: Sources, place: str, *, alone: bool = False) -> bool:
    """Return whether the line is under a condition that is true on one rank, ``if rank == 1:``, or behind the return of the others,
    ``if rank != 1: return``. With ``alone``: and neither an ``else`` nor another condition beside it is for the other ranks.
    """
    found = sources.around(place)
    for i, (outer, inner) in enumerate(itertools.pairwise(found)):
        block = block_of(outer, inner)
        before = block[: block.index(inner)] if block else []
        returns = [s for s in before if isinstance(s, ast.If) and isinstance(s.body[-1], ast.Return)]
        if any(_is_of_one_rank(s.test, is_not=True) and not (alone and _calls(s.body)) for s in returns):
            return True
        if isinstance(outer, ast.If) and inner in outer.body and _is_of_one_rank(outer.test):
            siblings = block_of(found[i - 1], outer) if i else []
            others = [
                s for s in siblings if isinstance(s, ast.If) and s is not outer and _RANK.search(ast.unparse(s.test))
            ]
            return not (alone and (_calls(outer.orelse) or others))
    return False


def block_of(outer: ast.stmt, inner: ast.stmt) -> list[ast.stmt]:
    """Return the block of a statement that has another one."""
    return next((b for b in (getattr(outer, n, []) for n in ("body", "orelse")) if inner in b), [])


def _calls(block: list[ast.stmt]) -> bool:
    return any(isinstance(node, ast.Call) for statement in block for node in ast.walk(statement))


def _is_of_one_rank(test: ast.expr, *, is_not: bool = False) -> bool:
    """Return whether a condition needs that the rank is, or is not, one: ``rank == 1``, ``not rank``, ``is_main_process``."""
    tests = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) and not is_not else [test]
    return any(_holds_on_one(t) == (not is_not) for t in tests)


def _holds_on_one(test: ast.expr) -> bool | None:
    """Return True of a condition that holds on one rank, False of one that holds on the others; None of what does not tell."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        if _ITS_RANK.fullmatch(_last_name(test.operand)):
            return True
        of_operand = _holds_on_one(test.operand)
        return None if of_operand is None else not of_operand
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and _RANK.search(ast.unparse(test)):
        return {ast.Eq: True, ast.NotEq: False}.get(type(test.ops[0]))
    return True if _MAIN.fullmatch(_last_name(test)) else None


def _last_name(node: ast.expr) -> str:
    """Return the name that an expression ends in: of ``trainer.is_main_process``, of ``is_main_process()``."""
    node = node.func if isinstance(node, ast.Call) and not node.args else node
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
