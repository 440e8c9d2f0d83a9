"""A failure's lines of source with what each rank did there, for terminals, pages and GitHub's annotations."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pytest_nsa.diagnosis.labels import RAISES
from pytest_nsa.diagnosis.verdict import Label, Verdict, stated
from pytest_nsa.evidence.values import Evidence
from pytest_nsa.report.plain import visible

MOST_LABELS = 6
CODE = 56  # columns of code, behind which it is cut
_GAP = 2


@dataclass(frozen=True, slots=True)
class LabelledLine:
    """A line and what ranks did there; ``line`` 0 where the ranks have no line. ``is_blamed``: the verdict's line."""

    file: str
    line: int
    notes: tuple[str, ...]
    is_blamed: bool


def list_lines(verdict: Verdict, labels: Sequence[Label]) -> list[LabelledLine]:
    """Return the lines of some labels of a verdict, each once."""
    notes: dict[tuple[str, int], list[str]] = {}
    for label in labels:
        text = stated(label.ranks, label.text, verdict.world_size).rstrip()
        notes.setdefault((label.file if label.line else "", label.line), []).append(text)
    return [
        LabelledLine(file, line, tuple(texts), bool(line) and verdict.where.startswith(f"{file}:{line} "))
        for (file, line), texts in notes.items()
    ]


def build_frame(verdict: Verdict) -> list[LabelledLine]:
    """Return the lines that the verdict's labels name: those of the verdict's file first, in the order of the source.

    [] where ranks only raised: pytest shows that by its traceback.
    """
    if all(label.text.startswith(RAISES) or not label.line for label in verdict.labels):
        return []
    own = get_file(verdict)
    lines = list_lines(verdict, verdict.labels[:MOST_LABELS])
    return sorted(lines, key=lambda of: (not of.line, of.file != own, of.file, of.line))


def get_file(verdict: Verdict) -> str:
    """Return the file of the verdict's line; '' without one."""
    return verdict.where.rpartition(":")[0]


def read_code(evidence: Evidence, file: str, line: int) -> str:
    """Return a line of source, '' where it is not kept. A verdict's path is relative to the tests' root."""
    root = evidence.job.root.rstrip("/")
    return evidence.sources.text(file, line) or evidence.sources.text(f"{root}/{file}", line) if line else ""


def frame_text(verdict: Verdict, evidence: Evidence) -> Iterator[str]:
    """Yield the frame for a terminal: 'LINE | code   <- note'. The code of a file has its common indentation removed.

    Further notes on a line, and ranks without a line, have a line each. Lines of the verdict's file come without its name.
    """
    lines, file = build_frame(verdict), get_file(verdict)
    width = max((len(str(of.line)) for of in lines if of.line), default=1)
    codes = _dedented(lines, evidence)
    column = min(max(map(len, codes), default=0), CODE) + _GAP
    for of, code in zip(lines, codes, strict=True):
        if of.line and of.file != file:
            file = of.file
            yield f"    {file}"
        number = str(of.line) if of.line else ""
        for i, note in enumerate(of.notes):
            shown = code[:CODE] if i == 0 else ""
            mark = ">" if of.is_blamed and i == 0 else " "
            yield f"  {mark} {number if i == 0 else '':>{width}} | {shown:<{column}}<- {note}"


def _dedented(lines: list[LabelledLine], evidence: Evidence) -> list[str]:
    found: dict[int, str] = {}
    for file in {of.file for of in lines}:
        of_file = [i for i, of in enumerate(lines) if of.file == file]
        codes = textwrap.dedent("\n".join(read_code(evidence, file, lines[i].line) for i in of_file)).split("\n")
        found |= dict(zip(of_file, codes, strict=True))
    return [found[i] for i in range(len(lines))]


MOST = 10  # errors and notices of a step that GitHub shows


def annotate(verdict: Verdict, name: str) -> Iterator[str]:
    """Yield a command per line that the verdict's labels name: an error at the line that is blamed, else a notice."""
    title = _property(f"{verdict.outcome}: {verdict.cause}, {verdict.culprits()} ({name})")
    for of in [of for of in list_lines(verdict, verdict.labels) if of.line][:MOST]:
        level, texts = ("error", (verdict.reason, *of.notes)) if of.is_blamed else ("notice", of.notes)
        yield f"::{level} file={_property(of.file)},line={of.line},title={title}::{_data('; '.join(texts))}"


def _data(text: str) -> str:
    return visible(" ".join(text.split())).replace("%", "%25")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
