"""Failures that pytest counts and no verdict explains: the run's report lists them. A killed worker's test gets a verdict here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pytest_nsa.diagnosis.verdict import Verdict
from pytest_nsa.evidence.load import find_test_folders
from pytest_nsa.observe.conclude import conclude
from pytest_nsa.report.summary import read_entries
from pytest_nsa.session.extensions import Extensions
from pytest_nsa.session.recorder import Recorder
from pytest_nsa.wire import masking
from pytest_nsa.wire.files import read_object
from pytest_nsa.wire.messages import plain_nodeid

LONGEST = 200


class Failures:
    """Registered where a run's reports are written: in the pytest process, under xdist in the controller."""

    def __init__(self) -> None:
        self._found: dict[str, str] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep a failure until the test runs again, as it does under plugins for retries."""
        nodeid = plain_nodeid(report.nodeid)
        if report.when == "setup":
            self._found.pop(nodeid, None)
        if report.failed and not getattr(report, "nsa_explained", False):
            self._found.setdefault(nodeid, _reason(report))

    @pytest.hookimpl(tryfirst=True)
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep the failure of a module that cannot be collected."""
        if report.failed:
            self._found.setdefault(report.nodeid, _reason(report))

    def without_verdict(self) -> dict[str, str]:
        """Return pytest's reason for each failure that no verdict explains, by the test's id, secrets masked on request."""
        return {masking.text(nodeid): masking.text(reason) for nodeid, reason in self._found.items()}

    def conclude_lost(self, run: Path, recorder: Recorder, extensions: Extensions) -> None:
        """Give a verdict to each test during which a worker was killed, by the evidence that its ranks left."""
        known = {entry.folder for entry in read_entries(run)}
        for folder in find_test_folders(run) if self._found else ():
            nodeid = self._lost(folder)
            if folder.name in known or not nodeid:
                continue
            try:
                verdict: Verdict = conclude(folder, extensions.rules)[0]
            except ValueError:
                continue  # a file of the folder cannot be read: the failure stays without a verdict
            recorder.add(folder, verdict)
            if verdict.failed:
                del self._found[nodeid]

    def _lost(self, folder: Path) -> str:
        """Return the id of the failed test that a folder belongs to; '' for the folder of another test."""
        written = str(read_object(folder / "job.json").get("nodeid", ""))
        for nodeid in self._found:
            # Ids that are equal after masking have a number.
            if written == nodeid or re.fullmatch(re.escape(masking.text(nodeid)) + r"(-\d+)?", written):
                return nodeid
        return ""


def _reason(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else report.longreprtext
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        return "no reason given"
    raised = [line.removeprefix("E  ") for line in lines if line.startswith("E  ")]  # as pytest marks it
    line = lines[0] if crash is not None else (raised or lines)[-1]
    return line.strip()[:LONGEST]
