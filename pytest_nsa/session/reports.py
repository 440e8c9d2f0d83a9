"""What a session puts into pytest's reports of tests on ranks: warnings, properties (rank R's as `rankR.NAME` where they differ),
and texts of failures; and which failures have no verdict.
"""

import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from _pytest._code import code
from _pytest._io import TerminalWriter

from pytest_nsa import marks
from pytest_nsa.diagnosis.verdict import Verdict
from pytest_nsa.evidence.load import find_test_folders
from pytest_nsa.evidence.values import Evidence, RankEvidence
from pytest_nsa.observe.conclude import conclude
from pytest_nsa.report.plain import visible
from pytest_nsa.report.summary import read_entries
from pytest_nsa.report.terminal import brief
from pytest_nsa.session.extensions import Extensions
from pytest_nsa.session.folders import Recorder
from pytest_nsa.wire import masking
from pytest_nsa.wire.files import read_object
from pytest_nsa.wire.messages import plain_nodeid


class ReprEntryNative(code.ReprEntryNative):
    """Lines of text: the headline and errors in red, source lines in bold.

    It has its base's name, by which pytest and xdist restore a report from JSON; the restored entry has no colour.
    """

    def toterminal(self, tw: TerminalWriter) -> None:
        """Write the lines."""
        for number, line in enumerate("".join(self.lines).splitlines(keepends=True)):
            is_error = number == 0 or line.startswith("E ")
            tw.write(line, red=is_error, bold=is_error or line.startswith((">", "---")))


def hang_line(verdict: Verdict, item: pytest.Item) -> str:
    """Return 'HANG [1.2 s] app/step.py:12 lock_deadlock, rank 1 of 2: test_steps'."""
    after = f" [{verdict.stalled_s:.1f} s]" if verdict.stalled_s else ""
    return visible(f"  HANG{after} {brief(verdict, Path('.'))}: {item.name}")


class HangLines:
    """Registered where the terminal is: in the pytest process, under xdist in the controller."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write the line of a hang below pytest's progress letter."""
        line = getattr(report, "nsa_hang", "")
        terminal: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        if line and terminal is not None:
            writer = self._config.get_terminal_writer()
            terminal.ensure_newline()
            if writer.width_of_current_line:  # letters under xdist
                terminal.write("\n")
            terminal.write_line(line[: writer.fullwidth] if terminal.isatty else line)


Properties = list[tuple[str, Any]]


def item_properties(ranks: Sequence[RankEvidence]) -> Iterator[tuple[str, Any]]:
    """Yield what `record_property` was given: the properties of each rank's last report, which has all recorded so far."""
    return _by_rank(
        [[p for e in r.reports[-1:] for p in _pairs(e["report"].get("user_properties"))] for r in ranks], ranks
    )


def suite_properties(ranks: Sequence[RankEvidence]) -> Iterator[tuple[str, Any]]:
    """Yield what `record_testsuite_property` was given."""
    return _by_rank([[pair for entry in r.reports for pair in _pairs(entry.get("of_the_suite"))] for r in ranks], ranks)


def _by_rank(recorded: list[Properties], ranks: Sequence[RankEvidence]) -> Iterator[tuple[str, Any]]:
    for rank, found in zip(ranks, recorded, strict=True):
        if rank.rank == 0:
            yield from found
        else:
            yield from ((f"rank{rank.rank}.{name}", value) for name, value in found if (name, value) not in recorded[0])


def _pairs(found: Any) -> Properties:
    """Return names and values of what was read from a folder; drop what has another form, as any program may have written it."""
    if not isinstance(found, list):
        return []
    return [(str(pair[0]), pair[1]) for pair in found if isinstance(pair, list) and len(pair) == 2]


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
