"""The context of a line in its source: the loop that it is in, and the condition on the rank that it is under."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator

from pytest_nsa.evidence.source import LOCATION, Sources

_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_COMPOUND = (ast.For, ast.AsyncFor, ast.While, ast.If, ast.With, ast.AsyncWith, ast.Match)
_BLOCKS = (ast.Try, ast.TryStar, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_BY_VALUE = ("sorted", "set", "frozenset", "argsort", "shuffle", "sample", "listdir", "glob", "iterdir", "scandir")
_RANK = re.compile(r"\brank\b|\.rank\b|get_rank\(\)|\bRANK\b")
_ITS_RANK = re.compile(r"_?(\w+_)?rank")
_MAIN = re.compile(r"_?(is_)?(main|master|chief|global_zero|rank_?(0|zero)|coordinator)(_process|_rank|_worker)?")


def loops_of(sources: Sources, place: str) -> list[ast.For | ast.While]:
    """Return the loops around a line, outermost first."""
    return [statement for statement in sources.around(place) if isinstance(statement, ast.For | ast.While)]


def are_of_one_function(sources: Sources, place: str, other: str) -> bool:
    """Return whether two locations are in one function: by its definition where that is kept, as methods of two classes may have
    one name; else by file and name.
    """
    one, two = LOCATION.match(place), LOCATION.match(other)
    if one is None or two is None or one["file"] != two["file"] or place[one.end() :] != other[two.end() :]:
        return False
    defined = {_definition(sources, p, place[one.end() :]) for p in (place, other)}
    return len(defined) == 1 or 0 in defined


def _definition(sources: Sources, place: str, name: str) -> int:
    """Return the line of the innermost definition of a function of that name around a location; 0 where none is kept."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return next((s.lineno for s in reversed(sources.around(place)) if isinstance(s, kinds) and s.name == name), 0)


def calls_nothing(sources: Sources, place: str) -> bool:
    """Return whether the innermost statement of a line calls no function: then what runs there is Python itself."""
    found = sources.around(place)
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
    """Return whether a node is a call, or an operator that a tensor may give a meaning of its own; arithmetic with a literal is
    not one.
    """
    if isinstance(node, ast.Call):
        return True
    return isinstance(node, ast.BinOp) and not isinstance(node.right, ast.Constant)


def is_past_the_loop(sources: Sources, place: str, other: str) -> bool:
    """Return whether ``place`` comes after a loop that ``other`` is in, in the same file."""
    a, b = LOCATION.match(place), LOCATION.match(other)
    if a is None or b is None or a["file"] != b["file"]:
        return False
    return any(int(a["line"]) > (loop.end_lineno or 0) for loop in loops_of(sources, other))


def is_in_while(sources: Sources, place: str) -> bool:
    """Return whether a line is in a ``while``, or is its condition."""
    return any(isinstance(loop, ast.While) for loop in loops_of(sources, place))


def line_that_ends(loop: ast.For | ast.While) -> int:
    """Return the line of a loop's condition; of a ``while True`` that of the first ``if`` in it that leaves it, if there is one."""
    if isinstance(loop, ast.While) and isinstance(loop.test, ast.Constant):
        for node in sorted((n for n in ast.walk(loop) if isinstance(n, ast.If)), key=lambda n: n.lineno):
            if any(isinstance(n, ast.Break | ast.Return | ast.Raise) for n in ast.walk(node)):
                return node.lineno
    return loop.lineno


def follows_in_its_block(sources: Sources, place: str, other: str) -> bool:
    """Return whether one line comes after another in a block, of a loop, and neither is under a condition of its own there: who
    comes to it in a round has come past the other one.
    """
    a, b = sources.around(place), sources.around(other)
    common = [statement for statement in a if statement in b]
    if not common or not any(isinstance(s, ast.For | ast.While) for s in common):
        return False
    outer, mine, theirs = common[-1], *(next((s for s in way if s not in common), None) for way in (a, b))
    if mine is None or theirs is None or any(isinstance(s, (*_COMPOUND, *_BLOCKS)) for s in (mine, theirs)):
        return False
    block = _block_of(outer, theirs)
    return mine in block and block.index(theirs) < block.index(mine)


def where_its_loss_is_computed(sources: Sources, place: str) -> str:
    """Return the location at which a function has computed what its line calls ``backward`` of; '' where it does so elsewhere."""
    match, found = LOCATION.match(place), sources.around(place)
    function = next((s for s in found if isinstance(s, ast.FunctionDef | ast.AsyncFunctionDef)), None)
    if match is None or function is None:
        return ""
    calls = [n for part in own_parts(found[-1]) for n in ast.walk(part) if isinstance(n, ast.Call)]
    losses = [c.func.value for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == "backward"]
    names = {n.id for loss in losses for n in ast.walk(loss) if isinstance(n, ast.Name)}
    computed = [
        s.lineno
        for s in ast.walk(function)
        if isinstance(s, ast.Assign)
        and s.lineno < int(match["line"])
        and any(isinstance(t, ast.Name) and t.id in names for t in s.targets)
        and any(isinstance(n, ast.Call) for n in ast.walk(s.value))
    ]
    return f"{match['file']}:{max(computed)} in {place[match.end() :]}" if computed else ""


def is_endless_generator(sources: Sources, place: str) -> bool:
    """Return whether a line is in a ``while True`` that yields and that nothing leaves: a ``for`` over it ends by a break alone."""
    for loop in loops_of(sources, place):
        nodes = list(ast.walk(loop))
        is_endless = isinstance(loop, ast.While) and isinstance(loop.test, ast.Constant) and bool(loop.test.value)
        leaves = any(isinstance(n, ast.Break | ast.Return | ast.Raise) for n in nodes)
        if is_endless and not leaves and any(isinstance(n, ast.Yield | ast.YieldFrom) for n in nodes):
            return True
    return False


def loops_around(sources: Sources, place: str) -> tuple[str, ...]:
    """Return the kinds of the loops around a line, outermost first: 'for', 'while', or 'endless' for one over what has no end."""
    kinds = []
    for loop in loops_of(sources, place):
        over = ast.unparse(loop.iter) if isinstance(loop, ast.For) else ""
        endless = re.search(r"\b(count|cycle|repeat|iter)\(", over)
        kinds.append("while" if not over else "endless" if endless else "for")
    return tuple(kinds)


def is_in_handler(sources: Sources, place: str) -> bool:
    """Return whether a line is in an ``except``: what runs there runs where that exception was raised alone."""
    match = LOCATION.match(place)
    line = int(match["line"]) if match else 0
    tries = [statement for statement in sources.around(place) if isinstance(statement, ast.Try)]
    return any(handler.lineno < line <= (handler.end_lineno or 0) for found in tries for handler in found.handlers)


def is_unwound_at(sources: Sources, place: str) -> bool:
    """Return whether an exception that is handled at a line is raised again after it: in a ``finally``, at the end of a
    ``with``, in an ``except`` that ends in a bare ``raise``.
    """
    match = LOCATION.match(place)
    line = int(match["line"]) if match else 0
    found = sources.around(place)
    if found and isinstance(found[-1], ast.With | ast.AsyncWith) and line < found[-1].body[0].lineno:
        return True
    for statement in (s for s in found if isinstance(s, ast.Try)):
        if statement.finalbody and statement.finalbody[0].lineno <= line <= (statement.end_lineno or 0):
            return True
        for handler in statement.handlers:
            last = handler.body[-1]
            if isinstance(last, ast.Raise) and last.exc is None and handler.lineno < line <= (handler.end_lineno or 0):
                return True
    return False


def is_in_retries(sources: Sources, place: str) -> bool:
    """Return whether the innermost loop of a line is a ``for`` around a ``try``: attempts, which come to an end."""
    loops = loops_of(sources, place)
    if not loops or not isinstance(loops[-1], ast.For):
        return False
    return any(isinstance(node, ast.Try) for statement in loops[-1].body for node in ast.walk(statement))


def may_be_left_out(sources: Sources, place: str) -> bool:
    """Return whether a round of the innermost ``for`` of a line may go without it: an ``if`` without ``else`` is around it, or
    before it one that ends in a ``continue``.
    """
    found, loops = sources.around(place), loops_of(sources, place)
    if not loops or not isinstance(loops[-1], ast.For):
        return False
    inside = found[found.index(loops[-1]) :]
    for outer, inner in itertools.pairwise(inside):
        if isinstance(inner, ast.If) and not inner.orelse and inner is not inside[-1]:
            return True
        block = getattr(outer, "body", [])
        before = block[: block.index(inner)] if inner in block else []
        if any(isinstance(s, ast.If) and isinstance(s.body[-1], ast.Continue) for s in before):
            return True
    return False


def is_in_loop(sources: Sources, place: str) -> bool:
    """Return whether a line is in a ``for`` or a ``while``."""
    return bool(loops_of(sources, place))


def has_a_comprehension(sources: Sources, place: str, called: str = "") -> bool:
    """Return whether a line has a loop of its own, as a list comprehension is one; not where it calls ``called`` beside
    it, and not in it.
    """
    found = sources.around(place)
    nodes = [node for part in (own_parts(found[-1]) if found else []) for node in ast.walk(part)]
    within = {id(n) for node in nodes if isinstance(node, _COMPREHENSIONS) for n in ast.walk(node)}
    calls = {id(node) for node in nodes if isinstance(node, ast.Call) and _called_name(node) == called}
    return bool(within) and not (calls and calls.isdisjoint(within))


def end_of_with(sources: Sources, place: str) -> int:
    """Return the line behind the body of the ``with`` that begins at a line; 0 where none does."""
    match = LOCATION.match(place)
    line = int(match["line"]) if match else 0
    found = [s for s in sources.around(place) if isinstance(s, ast.With | ast.AsyncWith) and s.lineno == line]
    return (found[-1].end_lineno or 0) + 1 if found else 0


def is_a_join(sources: Sources, place: str) -> bool:
    """Return whether a line begins a ``with`` of torch's `Join`, or of DDP's own ``join()``."""
    match = LOCATION.match(place)
    line = int(match["line"]) if match else 0
    found = [s for s in sources.around(place) if isinstance(s, ast.With) and s.lineno == line]
    return any(
        _called_name(i.context_expr) in ("Join", "join")
        for s in found
        for i in s.items
        if isinstance(i.context_expr, ast.Call)
    )


def has_a_counterpart(sources: Sources, place: str) -> bool:
    """Return whether a line is under a condition that leaves one rank out, and makes a call that a later line of the function makes
    under a condition that holds on that rank.
    """
    found = sources.around(place)
    function = next((s for s in reversed(found) if isinstance(s, ast.FunctionDef | ast.AsyncFunctionDef)), None)
    apart = next((s for s in found if isinstance(s, ast.If) and _tells_one(s.test) is False), None)
    if function is None or apart is None:
        return False
    names = {_called_name(n) for n in ast.walk(found[-1]) if isinstance(n, ast.Call)}
    later = [
        s
        for s in ast.walk(function)
        if isinstance(s, ast.If) and s.lineno > (apart.end_lineno or 0) and _tells_one(s.test)
    ]
    return any(isinstance(n, ast.Call) and _called_name(n) in names for s in later for b in s.body for n in ast.walk(b))


def is_here(sources: Sources, place: str) -> bool:
    """Return whether the source of a line was kept: else it is not known whether it is in a loop."""
    return bool(sources.around(place))


def share_a_loop(sources: Sources, place: str, other: str) -> bool:
    """Return whether one loop has both lines, and neither is past another loop that the other one is in."""
    return any(loop in loops_of(sources, other) for loop in loops_of(sources, place)) and not is_past_the_loop(
        sources, place, other
    )


def have_a_common_loop(sources: Sources, place: str, other: str) -> bool:
    """Return whether one loop has both lines, whichever other loops they are in or past."""
    return any(loop in loops_of(sources, other) for loop in loops_of(sources, place))


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
        if any(statement in behind[returns + 1 :] for statement in b) and not _may_change(inner.test, behind[:returns]):
            return True
    return False


def _returns_if(test: ast.expr, statement: ast.stmt) -> bool:
    """Return whether a statement is an ``if`` with this condition that ends in a return."""
    if not isinstance(statement, ast.If) or ast.unparse(statement.test) != ast.unparse(test):
        return False
    return isinstance(statement.body[-1], ast.Return | ast.Raise)


def _may_change(test: ast.expr, statements: list[ast.stmt]) -> bool:
    """Return whether statements set what a condition reads, or it calls something."""
    read = {ast.unparse(node) for node in ast.walk(test) if isinstance(node, ast.Name | ast.Attribute)}
    nodes = [node for statement in statements for node in ast.walk(statement)]
    are_set = {
        ast.unparse(n) for n in nodes if isinstance(n, ast.Name | ast.Attribute) and isinstance(n.ctx, ast.Store)
    }
    return bool(read & are_set) or (bool(statements) and any(isinstance(node, ast.Call) for node in ast.walk(test)))


def is_called_first(sources: Sources, place: str, one: str, other: str) -> bool | None:
    """Return whether a line calls the function ``one`` before ``other``, as Python evaluates it: what is given to a call comes
    before the call. '' stands for what the line calls that is no function of the user's. None where the line does not tell.
    """
    found = sources.around(place)
    parts = own_parts(found[-1]) if found else []
    later = (*_COMPREHENSIONS, ast.Lambda)
    if one == other or any(isinstance(node, later) for part in parts for node in ast.walk(part)):
        return None
    try:
        calls = [call for part in parts for call in _evaluated(part)]
    except (_Undecided, RecursionError):
        return None
    names = [_called_name(call) for call in calls]
    at = [i for i, name in enumerate(names) if name == one]
    other_at = [i for i, name in enumerate(names) if name == other]
    if one and other:
        return at[0] < other_at[0] if len(at) == len(other_at) == 1 else None
    known, is_one = (at, True) if one else (other_at, False)
    if len(known) != 1:
        return None
    given = {id(node) for node in ast.walk(calls[known[0]])}
    outside = [i for i, call in enumerate(calls) if id(call) not in given]
    return is_one if outside and all(i > known[0] for i in outside) else None


def own_parts(statement: ast.stmt) -> list[ast.AST]:
    """Return the expressions that a statement's own line evaluates: of a compound one not its body."""
    if isinstance(statement, _COMPOUND):
        return [node for node in ast.iter_child_nodes(statement) if isinstance(node, ast.expr | ast.withitem)]
    return [] if isinstance(statement, _BLOCKS) else [statement]


class _Undecided(Exception):
    """What a line calls depends on a value: a conditional expression, ``and``, a chain of comparisons."""


def _evaluated(node: ast.AST) -> Iterator[ast.Call]:
    """Yield calls in the order in which Python makes them. Raises `_Undecided` where it may leave one out."""
    may_leave_out = isinstance(node, ast.IfExp | ast.BoolOp) or (isinstance(node, ast.Compare) and len(node.ops) > 1)
    if may_leave_out and any(isinstance(n, ast.Call) for n in ast.walk(node)):
        raise _Undecided
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Assign | ast.AnnAssign):
        children.sort(
            key=lambda child: child is not node.value
        )  # before what it is assigned to; `+=` takes its target first
    for child in children:
        yield from _evaluated(child)
    if isinstance(node, ast.Call):
        yield node


def _called_name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _iterations(sources: Sources, place: str) -> list[ast.For | ast.comprehension]:
    """Return the loops around a line, outermost first, then those of its comprehensions."""
    found = sources.around(place)
    loops: list[ast.For | ast.comprehension] = [loop for loop in loops_of(sources, place) if isinstance(loop, ast.For)]
    return loops + [node for node in (ast.walk(found[-1]) if found else ()) if isinstance(node, ast.comprehension)]


def calls_each_of_some(sources: Sources, place: str) -> bool:
    """Return whether a line calls what a loop goes through: `for callback in callbacks: callback.on_step()`."""
    found, loops = sources.around(place), _iterations(sources, place)
    taken = {node.id for loop in loops for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
    calls = [node for node in (ast.walk(found[-1]) if found else ()) if isinstance(node, ast.Call)]
    return any(isinstance(n, ast.Name) and n.id in taken for call in calls for n in ast.walk(call.func))


def is_in_order_of_values(sources: Sources, place: str) -> bool:
    """Return whether the innermost loop of a line goes through what is sorted, or has no order: `for name in sorted(metrics)`."""
    loops = _iterations(sources, place)
    calls = [node for node in ast.walk(loops[-1].iter) if isinstance(node, ast.Call)] if loops else []
    return any(_called_name(call) in _BY_VALUE for call in calls) or bool(loops and isinstance(loops[-1].iter, ast.Set))


def is_for_one_rank(sources: Sources, place: str, *, alone: bool = False) -> bool:
    """Return whether the line is under a condition that is true on one rank, ``if rank == 1:``, or behind the return of the others,
    ``if rank != 1: return``. With ``alone``: and neither an ``else`` nor another condition beside it is for the other ranks.
    """
    found = sources.around(place)
    for i, (outer, inner) in enumerate(itertools.pairwise(found)):
        block = _block_of(outer, inner)
        before = block[: block.index(inner)] if block else []
        returns = [s for s in before if isinstance(s, ast.If) and isinstance(s.body[-1], ast.Return)]
        if any(_is_of_one_rank(s.test, is_not=True) and not (alone and _calls(s.body)) for s in returns):
            return True
        if isinstance(outer, ast.If) and inner in outer.body and _is_of_one_rank(outer.test):
            beside = _block_of(found[i - 1], outer) if i else []
            others = [
                s for s in beside if isinstance(s, ast.If) and s is not outer and _RANK.search(ast.unparse(s.test))
            ]
            return not (alone and (_calls(outer.orelse) or others))
    return False


def _block_of(outer: ast.stmt, inner: ast.stmt) -> list[ast.stmt]:
    """Return the block of a statement that has another one."""
    return next((b for b in (getattr(outer, n, []) for n in ("body", "orelse")) if inner in b), [])


def _calls(block: list[ast.stmt]) -> bool:
    return any(isinstance(node, ast.Call) for statement in block for node in ast.walk(statement))


def _is_of_one_rank(test: ast.expr, *, is_not: bool = False) -> bool:
    """Return whether a condition needs that the rank is, or is not, one: ``rank == 1``, ``not rank``, ``is_main_process``."""
    tests = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) and not is_not else [test]
    return any(_tells_one(t) == (not is_not) for t in tests)


def _tells_one(test: ast.expr) -> bool | None:
    """Return True of a condition that holds on one rank, False of one that holds on the others; None of what does not tell."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        if _ITS_RANK.fullmatch(_last_name(test.operand)):
            return True
        said = _tells_one(test.operand)
        return None if said is None else not said
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and _RANK.search(ast.unparse(test)):
        return {ast.Eq: True, ast.NotEq: False}.get(type(test.ops[0]))
    return True if _MAIN.fullmatch(_last_name(test)) else None


def _last_name(node: ast.expr) -> str:
    """Return the name that an expression ends in: of ``trainer.is_main_process``, of ``is_main_process()``."""
    node = node.func if isinstance(node, ast.Call) and not node.args else node
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
