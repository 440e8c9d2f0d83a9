"""The statements of a source file, and where two ranks may meet again after they have parted at one."""

import ast
import functools
import tokenize
from pathlib import Path

from pytest_nsa.wire.files import read_bytes

LARGEST = 4 << 20  # bytes of a file
Statement = ast.AST | int  # an unknown line is its number
END = "end"  # of a function
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")


class Source:
    """A parsed file. Statements are nodes of its tree; a case counts as its match."""

    def __init__(self, text: str) -> None:
        self.text = text.splitlines()
        self._at: dict[int, ast.AST] = {}
        self._parent: dict[ast.AST, tuple[ast.AST, str]] = {}
        self._next: dict[ast.AST, ast.AST] = {}
        try:
            self._walk(ast.parse(text))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            self._at = {}

    def _walk(self, tree: ast.AST) -> None:
        todo = [tree]
        while todo:
            node = todo.pop()
            for name in _BLOCKS:
                block = getattr(node, name, None)
                if not isinstance(block, list):  # a lambda's body is an expression
                    continue
                for before, statement in zip([None, *block], block, strict=False):
                    self._parent[statement] = node, name
                    head = node if isinstance(statement, ast.match_case) else statement  # its match decides
                    if before is not None and name not in ("handlers", "cases"):
                        self._next[before] = statement
                    for line in _lines_of_head(statement):
                        if isinstance(
                            node, (*_FUNCTIONS, ast.ClassDef)
                        ):  # `def f(): call()`: a frame of f is in the call
                            self._at[line] = head
                        self._at.setdefault(line, head)
                    todo.append(statement)

    def statement(self, line: int) -> Statement:
        """Return the statement of a line: for a compound one, of its head. Where its body is on that line, the compound one."""
        return self._at.get(line, line)

    def line(self, number: int) -> str:
        """Return the text of a line; '' for another number."""
        return self.text[number - 1].strip() if 0 < number <= len(self.text) else ""

    def head(self, number: int) -> str:
        """Return the statement of a line, without its body, as one line of text."""
        found = self._at.get(number)
        if found is None:
            return self.line(number)
        lines = sorted(n for n in _lines_of_head(found) if 0 < n <= len(self.text))
        return " ".join(" ".join(_without_comment(self.text[n - 1]) for n in lines).split())

    def meetings(self, statement: Statement) -> list[tuple[Statement | str, list[ast.AST]]]:
        """Return the statements at which two ranks may meet after a statement, the nearest first.

        Each has the loops around it, at the heads of which another iteration begins: none may begin before they meet.
        """
        found: list[tuple[Statement | str, list[ast.AST]]] = []
        node: Statement = statement
        while not isinstance(node, int) and node in self._parent:
            parent, block = self._parent[node]
            after = self._next.get(node)
            loops = self.loops(node)
            if after is not None:
                found.append((after, loops))
            if isinstance(parent, _LOOPS) and block == "body":
                found.append((parent, self.loops(parent)))
            if isinstance(parent, ast.Try) and block != "finalbody" and parent.finalbody:
                found.append((parent.finalbody[0], loops))
            if isinstance(parent, (*_FUNCTIONS, ast.ClassDef, ast.Module)):
                break
            node = parent
        found.append((END, []))
        return found

    def loops(self, node: ast.AST) -> list[ast.AST]:
        """Return the loops of the same function around a statement, innermost first."""
        found: list[ast.AST] = []
        while node in self._parent:
            node, block = self._parent[node]
            if isinstance(node, _FUNCTIONS):
                break
            if isinstance(node, _LOOPS) and block == "body":
                found.append(node)
        return found

    def is_below(self, line: int, node: ast.AST, block: str) -> bool:
        """Return whether a line is in a block of a statement."""
        inner = self._at.get(line)
        while inner is not None and inner in self._parent:
            parent, name = self._parent[inner]
            if parent is node and name == block:
                return True
            inner = parent
        return False


def _without_comment(line: str) -> str:
    """Return a line without the comment at its end."""
    try:
        for token in tokenize.generate_tokens(iter([line + "\n", ""]).__next__):
            if token.type == tokenize.COMMENT:
                return line[: token.start[1]]
    except (tokenize.TokenError, SyntaxError):  # a part of a statement
        pass
    return line


def _lines_of_head(node: ast.AST) -> range:
    """Return the lines of a statement, without those of its body."""
    if isinstance(node, ast.match_case):
        return range(node.pattern.lineno, max(node.body[0].lineno, node.pattern.lineno + 1))
    assert isinstance(node, ast.stmt | ast.ExceptHandler)
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
    body = getattr(node, "body", None) or getattr(node, "cases", None)
    if isinstance(body, list) and body:
        inner = body[0].pattern.lineno if isinstance(body[0], ast.match_case) else body[0].lineno
        return range(first, max(inner, node.lineno + 1))
    return range(first, (node.end_lineno or node.lineno) + 1)


@functools.cache
def read_source(file: str) -> Source:
    """Return a parsed file; an empty one where it cannot be read."""
    try:
        return Source(
            read_bytes(Path(file), LARGEST, follow=True).decode(errors="replace") if file.endswith(".py") else ""
        )
    except (OSError, ValueError):
        return Source("")
