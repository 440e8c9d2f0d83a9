"""Which names each line of a source file sets, and by which names it decides."""

import ast
import functools
import gc
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field

MOST_PARTS = 3  # of a chain of attributes: self.control.stop


@dataclass(slots=True)
class Lines:
    """Names and chains of attributes by line: those that a statement sets, by which it decides, and of which it returns a value."""

    sets: dict[int, tuple[str, ...]] = field(default_factory=dict)
    reads: dict[int, tuple[str, ...]] = field(default_factory=dict)
    returns: dict[int, tuple[str, ...]] = field(default_factory=dict)


@functools.cache
def parse_lines(path: str) -> Lines:
    """Return the names of a file's lines; none for a file that cannot be read or parsed."""
    found = Lines()
    # A collection may run code that is recorded, too: Python 3.11 raises SystemError where one parse begins inside another.
    collects = gc.isenabled()
    gc.disable()
    try:
        with tokenize.open(path) as source:
            tree = ast.parse(source.read())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return found
    finally:
        if collects:
            gc.enable()
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            head = range(node.lineno, _last_line_of_head(node) + 1)
            names = tuple(dict.fromkeys(n for target in _targets(node) for n in chains(target)))
            for line in head if names else ():
                found.sets[line] = tuple(dict.fromkeys((*found.sets.get(line, ()), *names)))
        if isinstance(node, ast.Return) and node.value is not None:
            found.returns[node.lineno] = tuple(dict.fromkeys(chains(node.value)))
        for part in decided_by(node):
            line = getattr(node, "lineno", part.lineno)  # a comprehension has none
            found.reads[line] = tuple(dict.fromkeys((*found.reads.get(line, ()), *chains(part))))
    return found


def _last_line_of_head(node: ast.stmt) -> int:
    """Return the last line of a statement, or of its head where it has a body."""
    body = getattr(node, "body", None) or getattr(node, "cases", None)
    if isinstance(body, list) and body:
        first = body[0]
        return max(node.lineno, (first.pattern.lineno if isinstance(first, ast.match_case) else first.lineno) - 1)
    return node.end_lineno or node.lineno


def _targets(node: ast.stmt) -> Iterator[ast.expr]:
    """Yield the expressions that a statement, without its body, sets."""
    match node:
        case ast.Assign():
            yield from node.targets
        case ast.AugAssign() | ast.AnnAssign() | ast.For() | ast.AsyncFor():
            yield node.target
        case ast.With() | ast.AsyncWith():
            yield from (item.optional_vars for item in node.items if item.optional_vars is not None)
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return
    for part in own_expressions(node):
        yield from (n.target for n in ast.walk(part) if isinstance(n, ast.NamedExpr))


def own_expressions(node: ast.stmt) -> Iterator[ast.expr]:
    """Yield the expressions of a statement that are not in its body."""
    for _, value in ast.iter_fields(node):
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, ast.expr):
                yield part
            elif isinstance(part, ast.withitem):
                yield part.context_expr


def decided_by(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions by which a node decides which code runs next."""
    match node:
        case ast.If() | ast.While() | ast.IfExp() | ast.Assert():
            yield node.test
        case ast.Match():
            yield node.subject
        case ast.For() | ast.AsyncFor():
            yield node.iter
        case ast.comprehension():
            yield from node.ifs
        case ast.BoolOp():
            yield node


def chains(node: ast.AST) -> Iterator[str]:
    """Yield the names, and the chains of attributes of names, in an expression: 'x', 'self.control.stop'."""
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        chain = chain_of(node)
        if chain:
            yield chain
        yield from chains(node.value)
    else:
        for child in ast.iter_child_nodes(node):
            yield from chains(child)


def chain_of(node: ast.expr) -> str:
    """Return a chain of attributes that begins with a name; '' for another expression, or one that is too long."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or len(parts) >= MOST_PARTS:
        return ""
    return ".".join([node.id, *reversed(parts)])
