"""Put what is known of a test's processes into pytest's reports: a verdict before a failure's text, a warning."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from _pytest._code.code import ExceptionChainRepr, ReprTraceback

from pytest_nsa.diagnosis.verdict import Verdict
from pytest_nsa.marks import find_place
from pytest_nsa.report.plain import visible
from pytest_nsa.report.terminal import headline, short_path
from pytest_nsa.session.recorder import Recorder
from pytest_nsa.session.reports.of_ranks import ReprEntryNative, report_warning
from pytest_nsa.session.started.jobs_of_test import Concluded

_shown_key = pytest.StashKey[tuple[list[str], Verdict | None, Path | None]]()


def keep(item: pytest.Item, jobs: Sequence[Concluded], text: list[str]) -> None:
    """Keep what a test's report shall show; a verdict only if it explains the failure."""
    explains = jobs[0] if jobs and not jobs[0].is_idle else None
    item.stash[_shown_key] = (
        text, explains.verdict if explains else None, explains.evidence.folder if explains else None
    )  # fmt: skip


def has(item: pytest.Item) -> bool:
    """Return whether a text is kept for the test's next report."""
    return _shown_key in item.stash


def add(item: pytest.Item, report: Any, recorder: Recorder) -> None:
    """Add what is kept to a report, once."""
    text, verdict, folder = item.stash.get(_shown_key, ([], None, None))
    if not text:
        return
    del item.stash[_shown_key]
    if report.failed:
        _put_first(report, text, is_explained=verdict is not None)
    if verdict is not None:
        report.nsa_explained = verdict.failed
        named = ("nsa.verdict", headline(verdict))
        report.user_properties.append(named)
        item.user_properties.append(named)  # of its later reports
        if hasattr(report, "wasxfail") and folder is not None:
            recorder.expect_failure(folder, verdict)


def _put_first(report: Any, text: list[str], *, is_explained: bool) -> None:
    """Put the verdict before the failure's text, and into the short summary, in a form that xdist's workers can send."""
    shown = "\n".join(map(visible, text)) + "\n"
    if isinstance(report.longrepr, ExceptionChainRepr):
        entry = ReprTraceback([ReprEntryNative([shown])], None, style="native")
        report.longrepr.chain = [(entry, None, "The test itself:"), *report.longrepr.chain]
        if is_explained and report.longrepr.reprcrash is not None:
            report.longrepr.reprcrash.message = visible(text[0])
    else:
        report.longrepr = f"{shown}{report.longrepr}"


def warn(item: pytest.Item, text: str) -> None:
    """Show a warning that no filter turns into a failure."""
    message = warnings.WarningMessage(pytest.PytestWarning(f"nsa: {text}"), pytest.PytestWarning, *find_place(item))
    report_warning(item, message)


def place(frame: FrameType | None, root: Path) -> str:
    """Return the innermost line of the repository on a stack."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(root) and "site-packages" not in path.parts:
            return f"{short_path(path)}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
