"""Find the lines of the user's code that change parameters or gradients outside of an optimizer's step. The source around that step
is searched, for replicas that differ though their gradients were reduced.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

from nsa.trace.divergence.assignments import Function, functions_of
from nsa.trace.frames import user_frames

DEPTH = 3  # functions that call each other, down to the change
MOST = 16  # changes around a step that are kept
_IN_PLACE = re.compile(r"[a-z]\w*[a-z0-9]_")
_NO_CHANGE = {"requires_grad_", "share_memory_", "detach_", "retain_grad_", "pin_memory_", "record_stream_", "barrier_"}
_RANK = re.compile(r"\brank\b|\.rank\b|get_rank\(\)|\bRANK\b|is_(main|master|global_zero|local_zero)|main_process")
_CLIPS = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")
_OF_PARAMETERS = re.compile(
    r"\.data\b|\.(weight|bias|in_proj_weight)\b|parameters\(\)|^(p|q|param|parameter|w|weight|target)\b"
)


@dataclass(frozen=True, slots=True)
class Change:
    """A change of parameters or of gradients at ``place``; ``call`` is the line of the running function that leads there, and
    ``condition`` that of the innermost ``if`` on the path, '' without one: each is ``file:line in function``. ``by_rank``: one of
    the conditions on the path tests the rank.
    """

    of: str  # "parameter" or "gradient"
    place: str
    call: str
    condition: str
    by_rank: bool

    def as_list(self) -> list[str]:
        """Return the form in which a record of checksums has it."""
        return [self.of, self.place, self.call, self.condition, "rank" if self.by_rank else ""]


def changes_around(attributes: frozenset[str]) -> list[list[str]]:
    """Return the changes in the functions of the user's code that run; ``attributes`` are the names of a model's parameters."""
    found: dict[tuple[str, ...], list[str]] = {}
    for frame in user_frames(sys._getframe(1)):
        code = frame.f_code
        for change in _in_function(code.co_filename, code.co_name, frame.f_lineno, attributes):
            found.setdefault(tuple(change.as_list()), change.as_list())
    return list(found.values())[:MOST]


@functools.lru_cache(maxsize=256)
def _in_function(file: str, name: str, line: int, attributes: frozenset[str]) -> tuple[Change, ...]:
    """Return the changes in a function of a file, which is running at ``line``."""
    functions = functions_of(file)
    running = [f for f in functions if f.name == name and f.lineno <= line <= (f.end_lineno or f.lineno)]
    if not running:
        return ()
    way = frozenset(f.name for f in running)  # not searched again: they lead to the step itself
    return tuple(_Search(file, functions, attributes).in_function(running[-1], _Under("", by_rank=False), way))


@dataclass(frozen=True, slots=True)
class _Under:
    """The innermost ``if`` on the path, and whether one of the conditions on the path tests the rank."""

    line: str
    by_rank: bool


@dataclass(frozen=True, slots=True)
class _Search:
    """A search for changes in the functions of a file; ``attributes`` are the names of the model's parameters."""

    file: str
    functions: tuple[Function, ...]
    attributes: frozenset[str]

    def in_function(self, function: Function, under: _Under, way: frozenset[str]) -> Iterator[Change]:
        """Yield the changes in a function, under a condition, and in those that it calls; ``way``: its name and its callers'."""
        yield from self._in_block(function.body, function.name, _parameters_of(function), under, way)

    def _in_block(
        self, block: list[ast.stmt], name: str, variables: set[str], under: _Under, way: frozenset[str]
    ) -> Iterator[Change]:
        for statement in block:
            here = f"{self.file}:{statement.lineno} in {name}"
            for expression in _own(statement):
                for receiver, line in _changed_in(expression):
                    if of := self._changed_kind(receiver, variables):
                        place = f"{self.file}:{line} in {name}"
                        yield Change(of, place, place, under.line, under.by_rank)
                for called in self._called_in(expression, way) if len(way) < DEPTH else ():
                    for inner in self.in_function(called, under, way | {called.name}):
                        yield replace(inner, call=here)
            inside = under
            if isinstance(statement, ast.If):
                inside = _Under(here, under.by_rank or bool(_RANK.search(ast.unparse(statement.test))))
            for inner_block in _blocks(statement):
                yield from self._in_block(inner_block, name, variables, inside, way)

    def _changed_kind(self, receiver: str, variables: set[str]) -> str:
        """Return the kind of the expression that is changed: "gradient", "parameter", or "" for something else."""
        if re.search(r"\bgrads?\b|\.grad\b", receiver):
            return "gradient"
        is_one = receiver in variables or receiver.rpartition(".")[2] in self.attributes
        return "parameter" if is_one or _OF_PARAMETERS.search(receiver) else ""

    def _called_in(self, node: ast.AST, way: frozenset[str]) -> Iterator[Function]:
        """Yield the functions of the file that an expression may call, by name; for a method, also those of other classes."""
        for call in (n for n in ast.walk(node) if isinstance(n, ast.Call)):
            name = _called_name(call)
            if isinstance(call.func, ast.Name) and all(f.name != name for f in self.functions):
                name = "__call__"
            if name not in way:
                yield from (f for f in self.functions if f.name == name)


def _own(statement: ast.stmt) -> list[ast.AST]:
    """Return the nodes that a statement evaluates itself; for a statement with a body, those before the body."""
    if isinstance(statement, Function | ast.ClassDef):
        return []
    if not _blocks(statement):
        return [statement]
    return [node for node in ast.iter_child_nodes(statement) if isinstance(node, ast.expr | ast.withitem)]


def _blocks(statement: ast.stmt) -> list[list[ast.stmt]]:
    if isinstance(statement, Function | ast.ClassDef):
        return []
    blocks = [getattr(statement, part, []) for part in ("body", "orelse", "finalbody")]
    blocks += [part.body for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ()))]
    return [block for block in blocks if block]


def _parameters_of(function: ast.AST) -> set[str]:
    """Return the variables of loops over parameters in a function: ``for name, v in model.named_parameters()``."""
    found: set[str] = set()
    for loop in (n for n in ast.walk(function) if isinstance(n, ast.For | ast.comprehension)):
        pairs = [(loop.target, loop.iter)]
        if isinstance(loop.iter, ast.Call) and _called_name(loop.iter) == "zip" and isinstance(loop.target, ast.Tuple):
            pairs = list(zip(loop.target.elts, loop.iter.args, strict=False))
        for target, over in pairs:
            if "parameters()" in ast.unparse(over):
                found |= {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}
    return found


def _changed_in(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield (source text, line) of each object that an expression or an assignment changes in place."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call):
            name = _called_name(inner)
            if name in _CLIPS:
                yield "grad", inner.lineno
            elif _IN_PLACE.fullmatch(name) and name not in _NO_CHANGE and isinstance(inner.func, ast.Attribute):
                is_init_s = ast.unparse(inner.func.value).endswith("init") and inner.args
                yield ast.unparse(inner.args[0] if is_init_s else inner.func.value), inner.lineno
        elif isinstance(inner, ast.Assign | ast.AugAssign | ast.AnnAssign):
            for target in inner.targets if isinstance(inner, ast.Assign) else [inner.target]:
                text = ast.unparse(target.value if isinstance(target, ast.Subscript) else target)
                is_in_place = isinstance(inner, ast.AugAssign) or isinstance(target, ast.Subscript)
                if is_in_place or text.endswith((".data", ".grad")):
                    yield text, inner.lineno


def _called_name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
