"""The labels of a verdict as GitHub's workflow commands: a pull request shows each one at its line."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_nsa.diagnosis.verdict import Verdict
from pytest_nsa.report.frame import list_lines
from pytest_nsa.report.plain import visible

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
