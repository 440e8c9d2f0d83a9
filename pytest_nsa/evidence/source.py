"""The statements around the locations that evidence names, kept with the evidence: rules read no other file.

``source.jsonl`` of a test's folder has a line per function: its file, its first line, its text. So a folder gives the same
verdict on another machine, and after the sources have changed.
"""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_nsa.wire import masking
from pytest_nsa.wire.files import append, read_bytes, read_lines, to_json

FILE = "source.jsonl"
LARGEST = 64 << 10  # bytes of a function that is kept
SOURCE = 4 << 20  # bytes of a file that is read
MOST = 200  # functions of a test that are kept
LOCATION = re.compile(r"^(?P<file>.*):(?P<line>\d+) in ")


@dataclass(frozen=True, slots=True)
class Snippet:
    """The lines of an outermost function or statement of a file; ``first`` is the number of its first line."""

    file: str
    first: int
    text: str

    @property
    def last(self) -> int:
        """The number of its last line."""
        return self.first + self.text.count("\n")

    def statements(self) -> list[ast.stmt]:
        """Return the parsed statements, with the file's line numbers; [] if this version of Python cannot parse them."""
        is_indented = self.text[:1].isspace()
        text = f"if True:\n{self.text}" if is_indented else self.text
        try:
            tree: Any = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return []
        ast.increment_lineno(tree, self.first - (2 if is_indented else 1))
        return tree.body[0].body if is_indented else tree.body


@dataclass
class Sources:
    """The snippets of a folder, by location."""

    snippets: list[Snippet] = field(default_factory=list)
    _parsed: dict[Snippet, list[ast.stmt]] = field(default_factory=dict)
    _around: dict[str, tuple[ast.stmt, ...]] = field(default_factory=dict)  # many ranks are at one location

    def _snippet(self, file: str, line: int) -> Snippet | None:
        """Return the snippet of a line; None if unknown. A caller has only the file's name: None if two files have it."""
        at = [s for s in self.snippets if s.first <= line <= s.last and (s.file == file or file_name(s.file) == file)]
        return at[0] if len({s.file for s in at}) == 1 else None

    def line(self, file: str, line: int) -> str:
        """Return the text of a line without its indentation, '' where it is not kept."""
        return self.text(file, line).strip()

    def text(self, file: str, line: int) -> str:
        """Return the text of a line, '' where it is not kept."""
        snippet = self._snippet(file, line)
        return snippet.text.split("\n")[line - snippet.first].rstrip() if snippet is not None else ""

    def with_path(self, location: str) -> str:
        """Return ``file:line in function`` with the file's path, if the location has only its name and one file has this name."""
        match = LOCATION.match(location)
        snippet = self._snippet(match["file"], int(match["line"])) if match else None
        return location if match is None or snippet is None else snippet.file + location[len(match["file"]) :]

    def around(self, location: str) -> tuple[ast.stmt, ...]:
        """Return the statements that enclose ``file:line in function``, outermost first; () where its source is not kept."""
        if location not in self._around:
            self._around[location] = self._find_around(location)
        return self._around[location]

    def _find_around(self, location: str) -> tuple[ast.stmt, ...]:
        match = LOCATION.match(location)
        snippet = self._snippet(match["file"], int(match["line"])) if match else None
        if match is None or snippet is None:
            return ()
        if snippet not in self._parsed:
            self._parsed[snippet] = snippet.statements()
        line, found = int(match["line"]), []
        for statement in self._parsed[snippet]:
            found += [n for n in ast.walk(statement) if isinstance(n, ast.stmt) and has_line(n, line)]
        return tuple(sorted(found, key=lambda n: (n.lineno, -(n.end_lineno or n.lineno))))


def has_line(node: ast.stmt, line: int) -> bool:
    """Return whether a statement includes a line, of its decorators, too."""
    return first_line(node) <= line <= (node.end_lineno or node.lineno)


def first_line(node: ast.stmt) -> int:
    """Return the line at which a statement or its first decorator begins."""
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])


def read_sources(folder: Path) -> Sources:
    """Return what `record_sources` kept in a folder."""
    found = []
    for record in read_lines(folder / FILE):
        file, first, text = record.get("file"), record.get("first"), record.get("text")
        if isinstance(file, str) and isinstance(first, int) and isinstance(text, str) and first > 0:
            found.append(Snippet(file, first, text))
    return Sources(found)


def record_sources(
    folder: Path, locations: Iterable[tuple[str, int]], known: Sources, *, below: Path | None = None, keep: bool = True
) -> Sources:
    """Read the functions around ``locations`` (file, line) that ``known`` lacks, from files ``below`` a folder (None: from any).
    With ``keep``, write them to ``folder``. Return all known functions.
    """
    trees: dict[str, tuple[ast.Module, list[str]] | None] = {}
    found = Sources([*known.snippets])
    for file, line in dict.fromkeys(locations):
        if len(found.snippets) >= MOST:
            break
        if not file or found._snippet(file, line) is not None:
            continue
        if file not in trees:
            trees[file] = _read(file) if below is None or is_below(file, below) else None
        parsed = trees[file]
        snippet = _cut(file, line, *parsed) if parsed is not None else None
        if snippet is not None:
            found.snippets.append(snippet)
            with contextlib.suppress(OSError):  # a folder that can only be read
                if keep:
                    kept = {"file": snippet.file, "first": snippet.first, "text": masking.source(snippet.text)}
                    append(folder / FILE, (to_json(kept) + "\n").encode())
    return found


def is_below(file: str, folder: Path) -> bool:
    """Return whether a file lies below a folder."""
    try:
        return Path(file).resolve().is_relative_to(folder)
    except (OSError, ValueError):  # a name with a NUL byte, a cycle of links
        return False


def _read(file: str) -> tuple[ast.Module, list[str]] | None:
    try:
        # Evidence of unknown origin names the file: only Python sources are read and kept in the folder.
        if not file.endswith(".py"):
            return None
        text = read_bytes(Path(file), SOURCE, follow=True).decode()
        return ast.parse(text), text.splitlines()
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _cut(file: str, line: int, tree: ast.Module, lines: list[str]) -> Snippet | None:
    """Return the outermost statement that includes a line; for a class, the outermost one in it."""
    statement = next(_enclosing(tree.body, line), None)
    if statement is None:
        return None
    first = first_line(statement)
    text = "\n".join(lines[first - 1 : statement.end_lineno])
    return Snippet(file, first, text) if len(text) <= LARGEST else None


def _enclosing(body: list[ast.stmt], line: int) -> Iterator[ast.stmt]:
    for statement in body:
        if has_line(statement, line):
            if isinstance(statement, ast.ClassDef):
                yield from _enclosing(statement.body, line)
            else:
                yield statement


def file_name(file: str) -> str:
    """Return the last part of a file's path, or of a location's: all that the lines that led to a call have."""
    return file.rpartition("/")[2]
