"""Mitigations one at a time and together, and the controls: what passes tells where to look."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_nsa.fixtures import Group
from tests_cpu.plan.scenarios import CPU, Scenario, rows, run


@pytest.mark.parametrize("row", rows(7, CPU))
def test_mitigation(row: Scenario, group: Group, artifacts: Path, fault: str | None) -> None:
    run(row, CPU, group, artifacts, fault)
