"""One branch forced: a branch that fails alone has the faulty backward."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_nsa.fixtures import Group
from tests_cpu.plan.scenarios import CPU, Scenario, rows, run


@pytest.mark.parametrize("row", rows(3, CPU))
def test_branch(row: Scenario, group: Group, artifacts: Path, fault: str | None) -> None:
    run(row, CPU, group, artifacts, fault)
