"""Which of two ranks is in a later round of the loops that both are in, by the loops' counters."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping

from pytest_nsa.evidence.board import Collective
from pytest_nsa.evidence.values import Evidence

MOST_KINDS = 64  # kinds of ranks, each compared with each
_AROUND = ("tqdm", "trange", "list", "tuple", "iter", "islice", "track")  # functions of an iterator that keep its order
_STEP_AT = {"range": 2, "trange": 2, "count": 1}  # index of the argument that is the step


def alike(evidence: Evidence, found: Mapping[int, Collective], ranks: Iterable[int]) -> list[list[int]]:
    """Return lists of ranks with equal evidence, so that one rank of each list is compared for all of it.

    [] where there are more than `MOST_KINDS` lists: then the comparison is not made.
    """
    kinds: dict[object, list[int]] = {}
    for r in ranks:
        rank = evidence.ranks[r]
        kinds.setdefault((rank.threads, tuple(rank.rounds.items()), found[r].way), []).append(r)
    return list(kinds.values()) if len(kinds) <= MOST_KINDS else []


def find_counter(loop: ast.For | ast.While, line: int, counts: Mapping[str, int], scope: ast.stmt | None) -> int | None:
    """Return the number of the round that a line of a loop is in; larger is later.

    None where no counter shows it, or where the counter may start differently on each rank (`range(rank, n,
    world_size)`). ``scope`` is the function.
    """
    if line < loop.body[0].lineno:  # the next round has not begun
        return None
    if isinstance(loop, ast.For):
        name, sign = _counter(loop.target, loop.iter)
        if name in counts and not _is_taken(name, loop):
            return sign * counts[name]
    return _counted_by_hand(loop, line, counts, scope)


def _counted_by_hand(
    loop: ast.For | ast.While, line: int, counts: Mapping[str, int], scope: ast.stmt | None
) -> int | None:
    """Return the round by a variable that each round increments (``n += 1``); None without one."""
    for statement in loop.body:
        if any(isinstance(node, ast.Continue) for node in ast.walk(statement)):
            return None  # an increment below it counts only some of the rounds
        if not isinstance(statement, ast.AugAssign) or not isinstance(statement.op, ast.Add):
            continue
        by = _number(statement.value)
        name = statement.target.id if isinstance(statement.target, ast.Name) else ""
        if by is not None and by > 0 and name in counts and _begins_with_a_number(name, scope):
            return counts[name] - by * (line > statement.lineno)
    return None


def has_made_round(loop: ast.For | ast.While, inside: Mapping[str, int], left: Mapping[str, int]) -> bool:
    """Return whether a rank that has left a loop made the round that another rank is in, by the counter's last value."""
    name, sign = _counter(loop.target, loop.iter) if isinstance(loop, ast.For) else ("", 0)
    return name in inside and name in left and sign * left[name] >= sign * inside[name]


def is_first_round(loop: ast.For | ast.While, counts: Mapping[str, int]) -> bool | None:
    """Return whether the counter of a loop over a range or an enumerate has its first value; None without such a counter."""
    if isinstance(loop, ast.For) and isinstance(loop.iter, ast.Call):
        name, sign = _counter(loop.target, loop.iter)
        called = getattr(loop.iter.func, "id", "")
        numbers = [_number(argument) for argument in loop.iter.args]
        if name in counts and sign == 1 and called in ("range", "trange", "enumerate") and not _is_taken(name, loop):
            begin = numbers[0] if called != "enumerate" and len(numbers) > 1 else 0
            return counts[name] == begin if begin is not None else None
    return None


def _is_taken(name: str, loop: ast.For) -> bool:
    """Return whether an inner loop assigns the variable of an outer one, as nested loops over ``_`` do."""
    inner = (n for statement in loop.body for n in ast.walk(statement) if isinstance(n, ast.For))
    return any(isinstance(n, ast.Name) and n.id == name for found in inner for n in ast.walk(found.target))


def _begins_with_a_number(name: str, scope: ast.stmt | None) -> bool:
    """Return whether every value assigned to a variable in a function is a literal number."""
    assigned = [
        node.value
        for node in (ast.walk(scope) if scope is not None else ())
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets)
    ]
    return bool(assigned) and all(_number(value) is not None for value in assigned)


def _number(node: ast.expr) -> int | None:
    """Return the integer literal of an expression; None for anything else."""
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError):
        return None
    return value if type(value) is int else None


def _counter(target: ast.expr, over: ast.expr) -> tuple[str, int]:
    """Return the variable of a ``for`` that counts its rounds, with 1, or -1 where it counts down; ('', 0) where none
    does.
    """
    if not isinstance(over, ast.Call):
        return "", 0
    called = over.func.attr if isinstance(over.func, ast.Attribute) else getattr(over.func, "id", "")
    numbers = [_number(argument) for argument in over.args]
    first = target.elts[0] if isinstance(target, ast.Tuple) and target.elts else None
    if called in _STEP_AT and isinstance(target, ast.Name):
        begin = numbers[:1] if called == "count" or len(numbers) > 1 else []
        step = "".join(map(ast.unparse, over.args[_STEP_AT[called] :]))
        return ("", 0) if None in begin else (target.id, -1 if step.startswith("-") else 1)
    if called == "enumerate" and isinstance(first, ast.Name):
        begins_alike = len(over.args) == 1 and all(_number(k.value) is not None for k in over.keywords)
        return (first.id, 1) if begins_alike else ("", 0)
    return _counter(target, over.args[0]) if called in _AROUND and over.args else ("", 0)
