"""The files that a loop looks for, in a function that sleeps until a file exists, or until it is removed."""

from __future__ import annotations

import ast
import contextlib
import inspect
import linecache
import os
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from nsa.trace.files import wall_clock

MOST_FILES, MOST_FRAMES = 4, 8
_CHECKS = frozenset({"exists", "lexists", "isfile", "isdir", "is_file", "is_dir", "mkdir"})
_EXCLUSIVE = ("O_EXCL", "'x'", "'xb'")  # `open` fails if the file exists


def files_looked_for(frame: FrameType | None) -> list[dict[str, object]]:
    """Return each file that the innermost loop of a stack looks for, if the innermost frame sleeps: its ``path`` and, if it exists,
    the seconds since it was changed (``unchanged_s``) and whether a process of this user has it open (``is_open``).

    No code of the program is called: a path is read from variables, attributes and constants.
    """
    if frame is None or "sleep(" not in linecache.getline(frame.f_code.co_filename, frame.f_lineno):
        return []
    loop, depth = _loop_at(frame), 1
    while loop is None and frame.f_back is not None and depth < MOST_FRAMES:
        frame, depth = frame.f_back, depth + 1
        loop = _loop_at(frame)
    paths = dict.fromkeys(_paths_of(loop, frame)) if loop is not None else {}
    found = [_state_of(path) for path in list(paths)[:MOST_FILES]]
    are_there = [state for state in found if "unchanged_s" in state]
    opened = _open_files() if are_there else set()
    for state in are_there:
        state["is_open"] = os.path.realpath(str(state["path"])) in opened
    return found


def _paths_of(loop: ast.stmt, frame: FrameType) -> Iterator[str]:
    for node in ast.walk(loop):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        excludes = name == "open" and any(word in ast.unparse(node) for word in _EXCLUSIVE)
        if name in _CHECKS or excludes:
            subject = node.args[0] if node.args else getattr(node.func, "value", None)
            path = _value_of(subject, frame)
            if path:
                yield os.path.abspath(path)


def _loop_at(frame: FrameType) -> ast.stmt | None:
    """Return the innermost loop around a function's current line; None outside of loops, and without source."""
    try:
        lines, first = inspect.getsourcelines(frame.f_code)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError, TypeError):
        return None
    line = frame.f_lineno - max(first, 1) + 1
    found = [
        node for node in ast.walk(tree)
        if isinstance(node, ast.While | ast.For) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]  # fmt: skip
    return max(found, key=lambda node: node.lineno, default=None)


def _value_of(node: ast.AST | None, frame: FrameType) -> str:
    """Return the path that an expression evaluates to; '' for another value, or if a call would be needed."""
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.Name(id=name):
            return _as_path(frame.f_locals.get(name, frame.f_globals.get(name)))
        case ast.Attribute(value=ast.Name(id=name), attr=attribute):
            held = frame.f_locals.get(name, frame.f_globals.get(name))
            return _as_path(inspect.getattr_static(held, attribute, None))
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            parts = _value_of(left, frame), _value_of(right, frame)
            return os.path.join(*parts) if all(parts) else ""
        case ast.Call(func=ast.Name(id="Path" | "str"), args=[inner]):
            return _value_of(inner, frame)
    return ""


def _as_path(value: object) -> str:
    # A path of a user's class would run user code.
    return value if type(value) is str else str(value) if type(value) is type(Path()) else ""


def _state_of(path: str) -> dict[str, object]:
    try:
        status = os.lstat(path)
    except OSError:
        return {"path": path}
    return {"path": path, "unchanged_s": max(0.0, wall_clock() - status.st_mtime)}


def _open_files() -> set[str]:
    """Return the paths that processes have open, as far as this user may read them."""
    found: set[str] = set()
    for process in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # another user's, or one that has ended
            for descriptor in os.listdir(f"/proc/{process}/fd"):
                with contextlib.suppress(OSError):  # it has just been closed
                    found.add(os.readlink(f"/proc/{process}/fd/{descriptor}"))
    return found
