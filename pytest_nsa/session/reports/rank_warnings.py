"""Warnings that ranks have recorded, and what they left, as warnings of their test."""

from __future__ import annotations

import sys
import warnings

import pytest

from pytest_nsa import marks
from pytest_nsa.evidence.values import Evidence


def repeat_warnings(item: pytest.Item, evidence: Evidence) -> None:
    """Report the ranks' warnings to pytest, equal ones once, and the processes and threads that they left."""
    found = {}
    for rank in evidence.ranks:
        for w in rank.warnings:
            kind = getattr(sys.modules.get(w["module"]), w["category"], None)
            if not (isinstance(kind, type) and issubclass(kind, Warning)):
                kind = type(w["category"], (Warning,), {"__module__": w["module"]})
            found[w["module"], w["category"], w["message"], w["filename"], w["lineno"]] = kind
        who, place = f"rank {rank.rank} left", marks.find_place(item)
        for command in rank.left_running:
            found["", "", f"{who} a process running, which was ended: {command}", *place] = pytest.PytestWarning
        for name, where in rank.left_threads:
            text = f"{who} the thread {name} at {where}: it is no daemon: a process of torchrun would wait for it"
            found["", "", text, *place] = pytest.PytestWarning
    for (_, _, text, file, line), kind in found.items():
        report_warning(item, warnings.WarningMessage(text, kind, file, line))


def report_warning(item: pytest.Item, message: warnings.WarningMessage) -> None:
    """Report a warning of a test to pytest, past the filters, which may turn it into a failure."""
    item.ihook.pytest_warning_recorded.call_historic(
        kwargs={"warning_message": message, "nodeid": item.nodeid, "when": "runtest", "location": None}
    )
