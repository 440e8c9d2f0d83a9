"""Static graph: passing where the others fail, it is a mitigation for production."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_nsa.fixtures import Group
from tests_cpu.plan.scenarios import CPU, Scenario, rows, run


@pytest.mark.parametrize("row", rows(4, CPU))
def test_static_graph(row: Scenario, group: Group, artifacts: Path, fault: str | None) -> None:
    run(row, CPU, group, artifacts, fault)
