"""The plan at production size, from the table that the CPU suite runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_nsa.fixtures import Group
from tests_cpu.plan.running import run
from tests_cpu.plan.scenarios import GPU, Scenario, rows


@pytest.mark.parametrize("row", rows(GPU))
def test_scenario(row: Scenario, group: Group, artifacts: Path, fault: str | None) -> None:
    run(row, GPU, group, artifacts, fault)
