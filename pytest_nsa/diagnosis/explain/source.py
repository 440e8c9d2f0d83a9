"""The context of a source line: its loops, whether it calls anything, and where its inputs are computed."""

from __future__ import annotations

import ast

from pytest_nsa.evidence.source import LOCATION, Sources

COMPOUND = (ast.For, ast.AsyncFor, ast.While, ast.If, ast.With, ast.AsyncWith, ast.Match)
BLOCKS = (ast.Try, ast.TryStar, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def find_loops(sources: Sources, place: str) -> list[ast.For | ast.While]:
    """Return the loops around a line, outermost first."""
    return [statement for statement in sources.around(place) if isinstance(statement, ast.For | ast.While)]


def is_in_while(sources: Sources, place: str) -> bool:
    """Return whether a line is in a ``while``, or is its condition."""
    return any(isinstance(loop, ast.While) for loop in find_loops(sources, place))


def line_that_ends(loop: ast.For | ast.While) -> int:
    """Return the line of a loop's condition; for a ``while True``, the line of the first ``if`` in it that leaves it,
    if there is one.
    """
    if isinstance(loop, ast.While) and isinstance(loop.test, ast.Constant):
        for node in sorted((n for n in ast.walk(loop) if isinstance(n, ast.If)), key=lambda n: n.lineno):
            if any(isinstance(n, ast.Break | ast.Return | ast.Raise) for n in ast.walk(node)):
                return node.lineno
    return loop.lineno


def polled_condition(sources: Sources, place: str) -> tuple[str, bool]:
    """Return the condition of the innermost ``while`` around a line, and whether memory alone decides it: it calls nothing but
    ``len``. For a ``while True``, it is the negation of the first condition that leaves it. ('', False) outside of such loops.
    """
    loops = [loop for loop in find_loops(sources, place) if isinstance(loop, ast.While)]
    if not loops:
        return "", False
    test, is_left = loops[-1].test, False
    if isinstance(test, ast.Constant):
        at = line_that_ends(loops[-1])
        found = next((n for n in ast.walk(loops[-1]) if isinstance(n, ast.If) and n.lineno == at), None)
        if found is None:
            return "", False
        test, is_left = found.test, True
    calls = [n for n in ast.walk(test) if isinstance(n, ast.Call | ast.Await)]
    is_of_memory = all(isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == "len" for n in calls)
    return ast.unparse(ast.UnaryOp(ast.Not(), test) if is_left else test), is_of_memory


def loss_location(sources: Sources, place: str) -> str:
    """Return the location at which a function computed the object on which its line calls ``backward``; '' where that
    happens elsewhere.
    """
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


def is_unwinding_line(sources: Sources, place: str) -> bool:
    """Return whether an exception that is handled at a line is raised again after it: in a ``finally``, at the end of a
    ``with``, or in an ``except`` that ends in a bare ``raise``.
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


def own_parts(statement: ast.stmt) -> list[ast.AST]:
    """Return the expressions that a statement's own line evaluates, without the body of a compound statement."""
    if isinstance(statement, COMPOUND):
        return [node for node in ast.iter_child_nodes(statement) if isinstance(node, ast.expr | ast.withitem)]
    return [] if isinstance(statement, BLOCKS) else [statement]
