"""What a repository's hooks add to a session: causes and their rules, facts, the table of its plan, names of folders."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_nsa import marked, marks
from pytest_nsa.diagnosis.causes import CAUSES, Cause
from pytest_nsa.diagnosis.verdict import Fact
from pytest_nsa.report.summary import SCENARIOS
from pytest_nsa.wire.files import write_json

if TYPE_CHECKING:
    from pytest_nsa.diagnosis.engine import Rule

EVIDENCE_LIMIT_S = 5.0


class Extensions:
    """What the hooks returned. Called once, after collection: a conftest.py in a folder of tests is loaded by then."""

    def __init__(self, config: pytest.Config, report: Callable[[str], None]) -> None:
        self.config, self.report = config, report
        self.rules: tuple[Rule, ...] = ()
        self.scenarios: dict[str, str] = {}
        self._is_taken = False

    def take(self) -> None:
        """Call the hooks. Raises UsageError that names the hook and what is wrong with the value that it returned."""
        if self._is_taken:
            return
        self._is_taken = True
        for given in self.config.hook.pytest_nsa_causes(config=self.config):
            for pair in given or ():
                self.rules += (self._take_cause(pair),)
        for table in self.config.hook.pytest_nsa_scenarios(config=self.config):
            for name, reads_as in dict(table or {}).items():
                problem = marks.RULES["scenario"].check(marks.scenario(name, reads_as=reads_as).mark)
                if problem:
                    raise pytest.UsageError(f"pytest_nsa_scenarios: {name!r}: {problem}")
                self.scenarios[name] = reads_as

    def _take_cause(self, pair: Any) -> Rule:
        cause, rule = pair if isinstance(pair, tuple) and len(pair) == 2 else (None, None)
        if not isinstance(cause, Cause) or not callable(rule):
            raise pytest.UsageError(
                f"pytest_nsa_causes: {str(pair)[:80]}: give pairs of a Cause and a function that takes the Evidence"
            )
        if cause.name in CAUSES:
            raise pytest.UsageError(f"pytest_nsa_causes: {cause.name!r} is a cause already; give it another name")
        CAUSES[cause.name] = cause

        def forget() -> None:
            CAUSES.pop(cause.name, None)

        self.config.add_cleanup(forget)
        found: Rule = rule
        return found

    def wrong_scenario(self, item: pytest.Item) -> tuple[str, ...]:
        """Return an error message if ``item`` is marked with a scenario that the plan's table lacks; else ()."""
        mark = item.get_closest_marker("scenario")
        name = mark.args[0] if mark is not None and mark.args and marked.counts(item, mark) else None
        if not self.scenarios or not isinstance(name, str) or name in self.scenarios:
            return ()
        known = ", ".join(sorted(self.scenarios))
        return (f"{marks.named(item)}: scenario({name!r}): the plan's table has {known}",)

    def write_scenarios(self, run: Path) -> None:
        """Write the table into the run's folder, where the reports read it."""
        if self.scenarios and not (run / SCENARIOS).exists():
            write_json(run / SCENARIOS, self.scenarios, indent=1)

    def collect_evidence(self, folder: Path, pids: Mapping[int, int]) -> list[dict[str, Any]]:
        """Return the facts that hooks add for ranks that are about to be stopped, if they return within `EVIDENCE_LIMIT_S`."""
        if not self.config.pluginmanager.hook.pytest_nsa_collect_evidence.get_hookimpls():
            return []
        found: list[Fact] = []

        def collect() -> None:
            try:
                given = self.config.hook.pytest_nsa_collect_evidence(folder=folder, pids=pids)
                found.extend(fact for facts in given for fact in facts or () if isinstance(fact, Fact))
            except Exception as error:  # a conftest's error: the test and its verdict must not suffer
                self.report(f"pytest_nsa_collect_evidence failed: {type(error).__name__}: {error}")

        collector = threading.Thread(target=collect, name="nsa-evidence", daemon=True)
        collector.start()
        collector.join(EVIDENCE_LIMIT_S)
        if collector.is_alive():
            self.report(f"pytest_nsa_collect_evidence took more than {EVIDENCE_LIMIT_S:g} s: the verdict is without it")
        return [asdict(fact) for fact in found]
