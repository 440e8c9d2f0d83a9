"""Find the line of the user's code that sets a key, as ``group["lr"] = 0.01`` does, or that contains a text. The source is searched
when it is known that such a line has run.
"""

from __future__ import annotations

import ast
import functools
import linecache
import sys
from collections.abc import Iterator

from nsa.trace.frames import describe, user_frames

Function = ast.FunctionDef | ast.AsyncFunctionDef


def line_that_sets(key: str) -> str:
    """Return the first line that sets ``...[key]`` in the files of the running user code, ``file:line in function``; '' if there is
    none, or if several functions set it.
    """
    files = dict.fromkeys(frame.f_code.co_filename for frame in user_frames(sys._getframe(1)))
    found = [line for file in files for line in _lines_that_set(file, key)]
    return found[0] if len({(line.partition(":")[0], line.rpartition(" in ")[2]) for line in found}) == 1 else ""


def line_that_names(text: str) -> str:
    """Return the innermost running line of the user's code that contains ``text``, ``file:line in function``; '' without one."""
    frames = user_frames(sys._getframe(1))
    return next((describe(f) for f in frames if text in linecache.getline(f.f_code.co_filename, f.f_lineno)), "")


@functools.lru_cache(maxsize=32)
def functions_of(file: str) -> tuple[Function, ...]:
    """Return the functions of a file's source, an inner one after its outer one; () if it cannot be parsed."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    return tuple(node for node in ast.walk(tree) if isinstance(node, Function))


@functools.cache
def _lines_that_set(file: str, key: str) -> tuple[str, ...]:
    found: dict[int, str] = {}
    for function in functions_of(file):
        found.update((line, f"{file}:{line} in {function.name}") for line, name in _keys_set(function) if name == key)
    return tuple(found.values())


def _keys_set(function: ast.AST) -> Iterator[tuple[int, object]]:
    """Yield the line and the key of each assignment to a key that the source names."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign | ast.AugAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
                    yield node.lineno, target.slice.value
