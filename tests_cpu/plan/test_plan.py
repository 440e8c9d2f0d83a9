"""The plan on a CPU: a test per row of `scenarios.TABLE`. ``--phases 1-5`` runs only these phases."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_nsa.fixtures import Group
from tests_cpu.plan.running import run
from tests_cpu.plan.scenarios import CPU, Scenario, rows


@pytest.mark.parametrize("row", rows(CPU))
def test_scenario(row: Scenario, group: Group, artifacts: Path, fault: str | None) -> None:
    run(row, CPU, group, artifacts, fault)
