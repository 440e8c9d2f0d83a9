"""Two ranks, all traces, one step: which parameters are missing, which buckets were reduced."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_nsa.fixtures import Group
from tests_cpu.plan.scenarios import CPU, Scenario, rows, run


@pytest.mark.parametrize("row", rows(1, CPU))
def test_onestep(row: Scenario, group: Group, artifacts: Path, fault: str | None) -> None:
    run(row, CPU, group, artifacts, fault)
