"""``--plan-follow``: run the row that the last run's decision names next, and decide over both runs."""

import os
import re
from pathlib import Path

import pytest

from pytest_nsa.diagnosis.decision import Decision
from pytest_nsa.report.run import read_decision
from pytest_nsa.report.summary import read_entries
from tests_cpu.plan.decision import RAN_OUT, decide
from tests_cpu.plan.readiness import Verdicts

FOLLOWED = (
    "NSA_PLAN_FOLLOWED"  # the run, for workers and for the process that starts ranks: "latest" is another one by then
)
NEXT = re.compile(r"\brun (\w+) \(--phases \d+ -k \w+\)")


class Follow:
    """A plugin that selects rows by an earlier run. Raises UsageError where that names none."""

    def __init__(self, config: pytest.Config) -> None:
        folder = config.getoption("--ranks-artifacts") or config.getini("artifacts_dir")
        run = Path(os.environ.setdefault(FOLLOWED, str((config.rootpath / folder / "latest").resolve())))
        entries = read_entries(run)
        decision = read_decision(run, entries)
        self.earlier = {entry.name: entry.verdict for entry in entries if entry.verdict.scenario}
        slow = {name for name, v in self.earlier.items() if v.failed and v.cause in RAN_OUT}
        self.names = slow | set(NEXT.findall(" ".join((decision.action, *decision.path))))
        if not self.names:
            raise pytest.UsageError(f"--plan-follow: the decision of {run} names no row to run")

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Keep the rows that were named."""
        marks = {item: item.get_closest_marker("scenario") for item in items}
        kept = [item for item, mark in marks.items() if mark is not None and mark.args[0] in self.names]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_nsa_decide(self, verdicts: Verdicts) -> Decision:
        """Decide over both runs."""
        return decide({**self.earlier, **verdicts})
