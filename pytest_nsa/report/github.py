"""The labels of a verdict as GitHub's workflow commands: a pull request shows each one at its line."""

from __future__ import annotations

import os
from collections.abc import Iterator

from pytest_nsa.diagnosis.verdict import Verdict, stated
from pytest_nsa.report.plain import visible

MOST = 10  # errors and notices of a step that GitHub shows


def are_wanted() -> bool:
    """Return whether a workflow of GitHub Actions runs this process."""
    return os.environ.get("GITHUB_ACTIONS") == "true"


def annotate(verdict: Verdict, name: str) -> Iterator[str]:
    """Yield a command per line that the verdict's labels name: an error at the line that is blamed, else a notice."""
    lines: dict[tuple[str, int], list[str]] = {}
    for label in verdict.labels:
        if label.line:
            lines.setdefault((label.file, label.line), []).append(stated(label.ranks, label.text, verdict.world_size))
    for (file, line), texts in list(lines.items())[:MOST]:
        is_blamed = verdict.where.startswith(f"{file}:{line} ")
        title = f"{verdict.outcome}: {verdict.cause}, {verdict.culprits()} ({name})"
        level, text = ("error", [f"{verdict.reason}", *texts]) if is_blamed else ("notice", texts)
        yield f"::{level} file={_property(file)},line={line},title={_property(title)}::{_data('; '.join(texts and text))}"


def _data(text: str) -> str:
    return visible(" ".join(text.split())).replace("%", "%25")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
