"""Writes in docs/causes what the code has: the list of causes from the registry, each page's program and the verdict that its
recorded evidence gets. `python docs/cause_pages.py`.
"""

from __future__ import annotations

import ast
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(__file__).with_name("causes")
LIST = FOLDER / "README.md"
PAGES = tuple(page for page in sorted(FOLDER.glob("*.md")) if page != LIST)
MOST_LINES = 8  # of a program
# A page names a planted fault, then shows its program and, in the next block, its verdict.
SHOWN = re.compile(
    r"^`tests_cpu/faults/planted_(?P<module>\w+)\.py::(?P<test>\w+)`:\n\n```python\n(?P<program>.*?)\n```\n"
    r"(?P<between>(?:(?!```)[^\n]*\n)*)```\n(?P<verdict>.*?)\n```$",
    re.M | re.S,
)


def list_with(text: str) -> str:
    """Return the list of causes with its chapters, names and summaries in the registry's order; what is above them stays."""
    from pytest_nsa.diagnosis.causes import CAUSES

    chapters: dict[str, list[str]] = {}
    for cause in CAUSES.values():
        chapters.setdefault(cause.chapter, []).append(f"- [{cause.name}]({cause.name}.md): {cause.summary}")
    above = text.partition("\n## ")[0].rstrip()
    return "\n\n".join([above, *(f"## {chapter}\n\n" + "\n".join(rows) for chapter, rows in chapters.items())]) + "\n"


def page_with(text: str) -> str:
    """Return the page of a cause with the program and the verdict of each planted fault that it names."""

    def shown(match: re.Match[str]) -> str:
        module, test = match["module"], match["test"]
        return (
            f"`tests_cpu/faults/planted_{module}.py::{test}`:\n\n```python\n{program(module, test)}\n```\n"
            f"{match['between']}```\n{verdict(module, test) or match['verdict']}\n```"
        )

    return SHOWN.sub(shown, text)


def program(module: str, test: str) -> str:
    """Return a planted fault's source: with the mark that its decorator sets, without comments for linters."""
    lines, function = _source(module, test)
    (planted,) = function.decorator_list
    assert isinstance(planted, ast.Call)
    ranks = next((ast.literal_eval(k.value) for k in planted.keywords if k.arg == "n"), 2)
    shown = lines[function.lineno - 1 : function.end_lineno]
    return "\n".join([f"@world_size({ranks})", *(re.sub(r"  # (type: ignore.*|HERE)$", "", line) for line in shown)])


def size(module: str, test: str) -> int:
    """Return the number of lines of a planted fault's body, without imports and docstring."""
    lines, function = _source(module, test)
    counted = [
        n for n in function.body
        if not isinstance(n, ast.Import | ast.ImportFrom) and not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))
    ]  # fmt: skip
    numbers = {line for n in counted for line in range(n.lineno, (n.end_lineno or n.lineno) + 1)}
    return sum(1 for number in numbers if lines[number - 1].strip())


def verdict(module: str, test: str) -> str:
    """Return what the terminal prints of a planted fault's recorded evidence, without the figures that change with each fit of
    the weights or with each run; '' where nothing is recorded of it.
    """
    from pytest_nsa.diagnosis.engine import diagnose
    from pytest_nsa.evidence.load import load
    from pytest_nsa.report.terminal import lines
    from tests_cpu.faults.recorded import unpack

    with tempfile.TemporaryDirectory() as folder:
        recorded = unpack(module, Path(folder), only=test).get(test)
        if recorded is None:
            return ""
        evidence = load(recorded)
        printed = [
            line for line in lines(diagnose(evidence), evidence) if not line.startswith(("  do ", "  evidence "))
        ]
    return "\n".join(_as_shown(printed, module))


def _as_shown(printed: list[str], module: str) -> Iterator[str]:
    for line in printed:
        line = re.sub(r"(?<![\w.])/[\w./-]*/(?=\w+\.py:\d)", "", line).replace(
            "test_planted.py", f"planted_{module}.py"
        )
        # The recording has the lines that this helper had then.
        line = re.sub(r"\bplanting\.py:\d+", "planting.py", line)
        yield re.sub(r"\d+%", "N%", re.sub(r" \(\d+% sure\)|; memory: .*", "", line))


def _source(module: str, test: str) -> tuple[list[str], ast.FunctionDef]:
    text = (ROOT / "tests_cpu" / "faults" / f"planted_{module}.py").read_text(encoding="utf-8")
    return text.splitlines(), next(n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name == test)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    LIST.write_text(list_with(LIST.read_text(encoding="utf-8")), encoding="utf-8")
    for page in PAGES:
        page.write_text(page_with(page.read_text(encoding="utf-8")), encoding="utf-8")
