"""Which lines of the user's code change parameters or gradients by themselves, beside an optimizer's step: sought in the source
around that step, for replicas that differ though their gradients were reduced.
"""

from __future__ import annotations

import ast
import functools
import linecache
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from nsa.trace.frames import user_frames

DEPTH = 3  # functions that call each other, down to the change
MOST = 16  # changes around a step that are kept
_IN_PLACE = re.compile(r"[a-z]\w*[a-z0-9]_")
_NO_CHANGE = {"requires_grad_", "share_memory_", "detach_", "retain_grad_", "pin_memory_", "record_stream_", "barrier_"}
_CLIPS = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")
_OF_PARAMETERS = re.compile(
    r"\.data\b|\.(weight|bias|in_proj_weight)\b|parameters\(\)|^(p|q|param|parameter|w|weight|target)\b"
)
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True)
class Change:
    """A change of parameters or of gradients at ``place``; ``call`` is the line of the running function that leads there, and
    ``condition`` that of the innermost ``if`` on the way, '' where there is none: each is ``file:line in function``.
    """

    of: str  # "parameter" or "gradient"
    place: str
    call: str
    condition: str

    def as_list(self) -> list[str]:
        """As a record of checksums has it."""
        return [self.of, self.place, self.call, self.condition]


def changes_around() -> list[list[str]]:
    """Return the changes in the functions of the user's code that run, of a loop's body where the line that runs is in one."""
    found: dict[tuple[str, ...], list[str]] = {}
    for frame in user_frames(sys._getframe(1)):
        code = frame.f_code
        for change in _in_function(code.co_filename, code.co_name, frame.f_lineno):
            found.setdefault(tuple(change.as_list()), change.as_list())
    return list(found.values())[:MOST]


@functools.lru_cache(maxsize=256)
def _in_function(file: str, name: str, line: int) -> tuple[Change, ...]:
    """Return the changes in a function of a file, around a line that it is at."""
    functions = _functions(file)
    running = [f for f in functions if f.name == name and f.lineno <= line <= (f.end_lineno or f.lineno)]
    if not running:
        return ()
    function = running[-1]
    way = {f.name for f in running}  # what leads to the step is no change beside it
    return tuple(_of_block(file, function.name, function.body, functions, "", way))


@functools.lru_cache(maxsize=32)
def _functions(file: str) -> tuple[ast.FunctionDef | ast.AsyncFunctionDef, ...]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    return tuple(node for node in ast.walk(tree) if isinstance(node, _FUNCTION))


def _of_block(
    file: str, name: str, block: list[ast.stmt], functions: tuple[ast.FunctionDef | ast.AsyncFunctionDef, ...], condition: str,
    way: set[str],
) -> Iterator[Change]:  # fmt: skip
    """Yield the changes in statements of the function ``name``, made under ``condition``, and in what they call on the way down."""
    for statement in block:
        here = f"{file}:{statement.lineno} in {name}"
        for expression in _own(statement):
            for of, line in _made_in(expression):
                place = f"{file}:{line} in {name}"
                yield Change(of, place, place, condition)
            for called in _called(expression, functions, way):
                if len(way) < DEPTH:
                    for inner in _of_block(file, called.name, called.body, functions, condition, {*way, called.name}):
                        yield Change(inner.of, inner.place, here, inner.condition)
        under = here if isinstance(statement, ast.If) else condition
        for inside in _blocks(statement):
            yield from _of_block(file, name, inside, functions, under, way)


def _own(statement: ast.stmt) -> list[ast.AST]:
    """Return what a statement's own lines evaluate: of one with a body, what comes before it."""
    if isinstance(statement, (*_FUNCTION, ast.ClassDef)):
        return []
    if not _blocks(statement):
        return [statement]
    return [node for node in ast.iter_child_nodes(statement) if isinstance(node, ast.expr | ast.withitem)]


def _blocks(statement: ast.stmt) -> list[list[ast.stmt]]:
    if isinstance(statement, (*_FUNCTION, ast.ClassDef)):
        return []
    blocks = [getattr(statement, part, []) for part in ("body", "orelse", "finalbody")]
    blocks += [part.body for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ()))]
    return [block for block in blocks if block]


def _made_in(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield what is changed in an expression or an assignment, and at which line."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call):
            name = inner.func.attr if isinstance(inner.func, ast.Attribute) else getattr(inner.func, "id", "")
            if name in _CLIPS:
                yield "gradient", inner.lineno
            elif _IN_PLACE.fullmatch(name) and name not in _NO_CHANGE and isinstance(inner.func, ast.Attribute):
                of_module = ast.unparse(inner.func.value).endswith("init") and inner.args
                receiver = ast.unparse(inner.args[0] if of_module else inner.func.value)
                yield from _of(receiver, inner.lineno)
        elif isinstance(inner, ast.Assign | ast.AugAssign | ast.AnnAssign):
            for target in inner.targets if isinstance(inner, ast.Assign) else [inner.target]:
                changed = target.value if isinstance(target, ast.Subscript) else target
                is_in_place = isinstance(inner, ast.AugAssign) or isinstance(target, ast.Subscript)
                text = ast.unparse(changed)
                if is_in_place or text.endswith((".data", ".grad")):
                    yield from _of(text, inner.lineno)


def _of(receiver: str, line: int) -> Iterator[tuple[str, int]]:
    if re.search(r"\bgrads?\b|\.grad\b", receiver):
        yield "gradient", line
    elif _OF_PARAMETERS.search(receiver):
        yield "parameter", line


def _called(
    node: ast.AST, functions: tuple[ast.FunctionDef | ast.AsyncFunctionDef, ...], way: set[str]
) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the functions of the file that an expression calls by a name that one of them alone has."""
    for call in (n for n in ast.walk(node) if isinstance(n, ast.Call)):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        name = "__call__" if not any(f.name == name for f in functions) and isinstance(call.func, ast.Name) else name
        named = [f for f in functions if f.name == name]
        if len(named) == 1 and name not in way:
            yield named[0]
