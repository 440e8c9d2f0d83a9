"""Hooks that a downstream repository may implement, in a conftest.py or a plugin."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from pytest_nsa.diagnosis.decision import Decision
from pytest_nsa.diagnosis.verdict import Verdict


@pytest.hookspec(firstresult=True)
def pytest_nsa_decide(verdicts: Mapping[str, Verdict]) -> Decision | None:
    """Decide over a whole run, from its ``verdicts`` by scenario, or by test where none is a scenario.

    Called once, at the end of the session, by the process that writes the reports. Return None to leave it to others; the
    plugin's own decision reads the surest verdict first. The sentence heads SUMMARY.md, report.html and the closing lines.
    """
