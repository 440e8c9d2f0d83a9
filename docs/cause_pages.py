"""Writes in docs/causes what the code has: the list of causes from the registry, each page's program and the verdict that its
recorded evidence gets. `python docs/cause_pages.py`.
"""

import ast
import contextlib
import functools
import json
import re
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

from pytest_nsa.diagnosis.divergence import with_divergence
from pytest_nsa.diagnosis.engine import diagnose
from pytest_nsa.evidence.load import load
from pytest_nsa.flow.first import FirstDivergence
from pytest_nsa.report import terminal
from tests_cpu.faults.recorded import unpack
from tests_cpu.faults.rows import Fault, faults

FOLDER = Path(__file__).with_name("causes")
LIST = FOLDER / "README.md"
PAGES = tuple(page for page in sorted(FOLDER.glob("*.md")) if page != LIST)
MOST_LINES = 8  # of a program
# A page names a recorded fault, then shows its program and, in the next block, its verdict.
SHOWN = re.compile(
    r"^Recorded as `(?P<archive>\w+)/(?P<test>\w+)`:\n\n```python\n(?P<program>.*?)\n```\n"
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
    """Return the page of a cause with the program and the verdict of each recorded fault that it names."""

    def shown(match: re.Match[str]) -> str:
        archive, test = match["archive"], match["test"]
        return (
            f"Recorded as `{archive}/{test}`:\n\n```python\n{program(archive, test)}\n```\n"
            f"{match['between']}```\n{verdict(archive, test)}\n```"
        )

    return SHOWN.sub(shown, text)


def program(archive: str, test: str) -> str:
    """Return the source of a fault: with the mark of its ranks, without comments for linters."""
    (function,) = ast.parse(_source(archive, test)).body
    assert isinstance(function, ast.FunctionDef)
    lines = _source(archive, test).splitlines()[function.lineno - 1 :]
    row = faults(archive)[test]
    text = "\n".join([f"@world_size({row.n})", *(re.sub(r"  # (type: ignore.*|HERE)$", "", line) for line in lines)])
    return _with_rank(re.sub(r", culprit(: int)?(?=\))", "", text, count=1), row) if _takes_culprit(function) else text


def _takes_culprit(function: ast.FunctionDef) -> bool:
    return any(argument.arg == "culprit" for argument in function.args.args)


def _with_rank(text: str, row: Fault) -> str:
    """Return a text with the number of the rank that the fixture ``culprit`` gives."""
    return re.sub(r"\bculprit\b", str(row.ranks[0]), text)


def size(archive: str, test: str) -> int:
    """Return the number of lines of a fault's body, without imports and docstring."""
    (function,) = ast.parse(_source(archive, test)).body
    assert isinstance(function, ast.FunctionDef)
    lines = _source(archive, test).splitlines()
    counted = [
        n for n in function.body
        if not isinstance(n, ast.Import | ast.ImportFrom) and not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))
    ]  # fmt: skip
    numbers = {line for n in counted for line in range(n.lineno, (n.end_lineno or n.lineno) + 1)}
    return sum(1 for number in numbers if lines[number - 1].strip())


def verdict(archive: str, test: str) -> str:
    """Return what the terminal prints of a recorded fault, without the figures that change with each fit of the weights or with
    each run.
    """
    with unpacked(archive, test) as folder:
        evidence = load(folder)
        found = diagnose(evidence)
        row = faults(archive)[test]
        if row.divergence:
            found = with_divergence(found, FirstDivergence.from_json(row.divergence), is_same=True)
        printed = [line for line in terminal.lines(found, evidence) if not line.startswith(("  do ", "  evidence "))]
    text = "\n".join(map(_without_figures, printed))
    return _with_rank(text, row) if row.divergence else text


def _without_figures(line: str) -> str:
    line = re.sub(r"(?<![\w.])/[\w./-]*/(?=\w+\.py:\d)", "", line)
    # The recording has the lines that this helper had then.
    line = re.sub(r"\bplanting\.py:\d+", "planting.py", line)
    return re.sub(r"\d+%", "N%", re.sub(r" \(\d+% sure\)|; memory: .*", "", line))


@contextlib.contextmanager
def unpacked(archive: str, test: str) -> Iterator[Path]:
    """Unpack the evidence of a recorded fault; give its folder. Raise KeyError where it is not recorded."""
    with tempfile.TemporaryDirectory() as folder:
        yield unpack(archive, Path(folder), only=test)[test]


@functools.cache
def _source(archive: str, test: str) -> str:
    with unpacked(archive, test) as folder:
        texts = [
            json.loads(line)["text"] for line in (folder / "source.jsonl").read_text(encoding="utf-8").splitlines()
        ]
    return next(textwrap.dedent(text) for text in texts if f"def {test}(" in text)


if __name__ == "__main__":
    LIST.write_text(list_with(LIST.read_text(encoding="utf-8")), encoding="utf-8")
    for page in PAGES:
        page.write_text(page_with(page.read_text(encoding="utf-8")), encoding="utf-8")
