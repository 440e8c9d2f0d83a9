"""Where verdicts are recorded: in the folder of the evidence, in the run's list, and in its log."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pytest_nsa.diagnosis.verdict import RULE_FAILED, Verdict
from pytest_nsa.report.run import write_verdict
from pytest_nsa.report.summary import VERDICTS
from pytest_nsa.session.folders import RunFolder
from pytest_nsa.system.disk_space import ignore_full_disk
from pytest_nsa.wire.files import append_line

# Defaults of a verdict's fields: of a test that passes, the run's list has only fields that differ from them.
_DEFAULTS = {
    name: value
    for name, value in Verdict(nodeid="", outcome="PASS").to_json().items()
    if name not in ("schema", "outcome")
}


class Recorder:
    """Writes verdicts into the run's folder: its list, in which a test's last line counts, and its log."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run

    def add(self, folder: Path, verdict: Verdict) -> None:
        """Record a verdict; report rules that failed to the run."""
        self._list(folder, verdict)
        for fact in verdict.evidence:
            if fact.kind == RULE_FAILED:
                self.run.report(f"{fact.text} ({folder.name}); the verdict is by the other rules")
        where = f" {verdict.cause} on {verdict.culprits()} at {verdict.where or '?'}" if verdict.failed else ""
        self.run.note(f"{verdict.outcome} {verdict.scenario or verdict.nodeid} {verdict.duration_s:.2f} s{where}")

    def expect_failure(self, folder: Path, verdict: Verdict) -> None:
        """Mark a failure as foreseen by xfail, in the test's folder and in the run's list."""
        self.replace(folder, replace(verdict, expected=True))

    def replace(self, folder: Path, verdict: Verdict) -> None:
        """Record another verdict on a test that has one."""
        with ignore_full_disk():
            folder.mkdir(exist_ok=True)  # that of a test which passed may be gone
            write_verdict(folder, verdict)
        self._list(folder, verdict)

    def _list(self, folder: Path, verdict: Verdict) -> None:
        fields = verdict.to_json()
        if not verdict.failed:  # most tests pass, and such lines are most of what a run leaves
            fields = {
                name: value for name, value in fields.items() if name not in _DEFAULTS or value != _DEFAULTS[name]
            }
        line = {"folder": folder.name, **fields}
        with ignore_full_disk():  # the terminal has the verdict
            append_line(self.run.path / VERDICTS, line)
