"""Which ranks a condition in the source lets through: by its value for each rank, where it names the rank."""

from __future__ import annotations

import ast
import enum
import itertools
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from pytest_nsa.diagnosis.explain.branches import block_of, names_the_rank
from pytest_nsa.diagnosis.explain.program import Frame
from pytest_nsa.evidence.source import Sources

_RANK_NAMES = ("rank", "get_rank", "global_rank", "local_rank", "RANK")
_SIZE_NAMES = ("world_size", "get_world_size", "size")
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Mod: operator.mod, ast.FloorDiv: operator.floordiv, ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
}  # fmt: skip


_LEAVES = ast.Return | ast.Raise | ast.Continue | ast.Break


class Path(enum.Enum):
    """What leads to a call from the function in which the ranks part."""

    PLAIN = "no condition"
    SELECTS = "a condition that selects these ranks"  # if rank == 0:
    EXCLUDES = "a condition that leaves the other ranks out"  # if rank != 1:
    DATA = "a condition on something else"  # if loss > limit:
    NOT_DATA = "a condition that something else does not hold"  # if not done:


class _UnknownError(Exception):
    pass


def path_to(sources: Sources, frames: Sequence[Frame], ranks: Collection[int], world_size: int) -> Path:
    """Return what leads ``ranks`` to their call through ``frames``, the outermost first."""
    found = Path.PLAIN
    for frame in frames:
        for test, is_else in _conditions(sources.around(frame.place), frame.line):
            lets = _lets(test, world_size)
            if lets is not None and is_else:
                lets = set(range(world_size)) - lets
            if lets == set(range(world_size)):
                continue  # as of `if world_size > 1`
            if not names_the_rank(test):
                found = Path.NOT_DATA if _is_negative(test) != is_else else Path.DATA
                continue
            if lets is None or lets >= set(ranks):
                return Path.EXCLUDES if _is_negative(test) != is_else else Path.SELECTS
    return found


def _conditions(statements: Sequence[ast.stmt], line: int) -> Iterator[tuple[ast.expr, bool]]:
    """Yield the condition of each ``if`` around a line, and of each one before it that leaves the block, as `if rank == 1: return`
    does; with whether the line is reached where it does not hold. ``statements`` enclose the line, outermost first.
    """
    for outer, inner in itertools.zip_longest(statements, statements[1:]):
        if isinstance(outer, ast.If):
            for block in (outer.body, outer.orelse):
                if any(_has(statement, line) for statement in block):
                    yield outer.test, block is outer.orelse
        block = block_of(outer, inner) if inner is not None else []
        for before in block[: block.index(inner)] if block else ():
            if isinstance(before, ast.If) and not before.orelse and isinstance(before.body[-1], _LEAVES):
                yield before.test, True


def _has(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _lets(test: ast.expr, world_size: int) -> set[int] | None:
    """Return the ranks for which a condition holds, or may hold where it names other things, too; None where it cannot be told."""
    found = set()
    for rank in range(min(world_size, 4096)):
        try:
            if _value(test, rank, world_size):
                found.add(rank)
        except _UnknownError:
            return None
    return found


def _value(node: ast.expr, rank: int, size: int) -> Any:
    """Return the value of an expression of the rank. Raises _UnknownError for what depends on anything else."""
    match node:
        case ast.Constant():
            return node.value
        case ast.Tuple() | ast.List() | ast.Set():
            return [_value(e, rank, size) for e in node.elts]
        case ast.UnaryOp(op=ast.Not()):
            return not _value(node.operand, rank, size)
        case ast.Compare(ops=[op], comparators=[right]) if type(op) in _COMPARE:
            if _is_rank(node.left) and _is_rank(right):
                raise _UnknownError  # `group.rank == rank`: one of the two is another rank's number
            return _COMPARE[type(op)](_value(node.left, rank, size), _value(right, rank, size))
        case ast.BinOp() if type(node.op) in _BINARY:
            try:
                return _BINARY[type(node.op)](_value(node.left, rank, size), _value(node.right, rank, size))
            except (ArithmeticError, TypeError):
                raise _UnknownError from None
        case ast.BoolOp():
            return _of_several(node, rank, size)
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)) | ast.Attribute(attr=name) | ast.Name(id=name):
            if name in _RANK_NAMES:
                return rank
            if name in _SIZE_NAMES:
                return size
    raise _UnknownError


def _is_rank(node: ast.expr) -> bool:
    node = node.func if isinstance(node, ast.Call) else node
    return getattr(node, "attr", getattr(node, "id", "")) in _RANK_NAMES


def _of_several(node: ast.BoolOp, rank: int, size: int) -> bool:
    """Return the value of an ``and`` or ``or``; of parts that depend on other things, as if they let the rank through."""
    known = []
    for value in node.values:
        try:
            known.append(bool(_value(value, rank, size)))
        except _UnknownError:
            continue
    if not known:
        raise _UnknownError
    return all(known) if isinstance(node.op, ast.And) else any(known)


def _is_negative(test: ast.expr) -> bool:
    """Return whether a condition says for what it does not hold: ``rank != 1``, ``not (rank == 1 and ...)``, ``not done``."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return not _is_negative(test.operand)
    if isinstance(test, ast.BoolOp):
        return any(map(_is_negative, test.values))
    return isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.NotEq | ast.NotIn)
