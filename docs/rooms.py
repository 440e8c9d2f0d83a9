"""Draws who imports whom, from the imports themselves, into docs/architecture.md. `python docs/rooms.py` writes it anew.

An arrow per pair of rooms (packages, or modules at the top), unless a longer way leads there as well. A circle is a ValueError.
"""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
# Left out: names for users, and entry points of a few lines.
QUIET = {"pytest_nsa.__init__", "pytest_nsa.__main__", "pytest_nsa.testing", "pytest_nsa.hookspecs", "nsa.__init__"}


def imports_of(tree: ast.Module) -> Iterator[str]:
    """The modules that a module imports, wherever in it, but for those that a type checker alone reads."""
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        todo += ast.iter_child_nodes(node)


def room_of(module: str) -> str:
    """'pytest_nsa.session' for 'pytest_nsa.session.runner.RankRunner'; '' for what is not ours."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] in ("nsa", "pytest_nsa") and len(parts) > 1 else ""


def arrows() -> dict[str, set[str]]:
    """The rooms that each room imports."""
    found: dict[str, set[str]] = {}
    for package in ("pytest_nsa", "nsa"):
        for path in sorted((ROOT / package).rglob("*.py")):
            room = room_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
            imported = {room_of(name) for name in imports_of(ast.parse(path.read_text(encoding="utf-8")))}
            there = {name for name in imported if _exists(name)} - {room}
            if room not in QUIET:
                found.setdefault(room, set()).update(there - QUIET)
    return found


def _exists(room: str) -> bool:
    path = ROOT.joinpath(*room.split("."))
    return bool(room) and (path.is_dir() or path.with_suffix(".py").is_file())


def shortest(found: dict[str, set[str]]) -> list[tuple[str, str]]:
    """The arrows that no longer way replaces. Raises ValueError for a circle."""
    try:
        order = list(TopologicalSorter(found).static_order())
    except CycleError as error:
        raise ValueError(f"rooms import each other in a circle: {' -> '.join(error.args[1])}") from error
    reached: dict[str, set[str]] = {}
    for room in order:
        reached[room] = set().union(*({other, *reached.get(other, ())} for other in found.get(room, ())))
    return [
        (room, other)
        for room in sorted(found)
        for other in sorted(found[room])
        if not any(other in reached[between] for between in found[room] - {other})
    ]


def drawing() -> str:
    """Mermaid, which code hosts and mkdocs draw."""
    pairs = shortest(arrows())
    lines = [f"    {_id(a)}[{a}] --> {_id(b)}[{b}]" for a, b in pairs]
    return "\n".join(["```mermaid", "graph TD", *lines, "```"])


def _id(room: str) -> str:
    return room.replace(".", "_")


def page_with(text: str) -> str:
    """The page with the drawing between its two marks."""
    before, _, rest = text.partition("<!-- rooms -->\n")
    _, _, after = rest.partition("<!-- end of rooms -->")
    return f"{before}<!-- rooms -->\n{drawing()}\n<!-- end of rooms -->{after}"


if __name__ == "__main__":
    PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
