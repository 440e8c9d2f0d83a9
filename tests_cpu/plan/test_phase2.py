"""The same on gloo: a failure here too means autograd or the graph, not NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_nsa.fixtures import Group
from tests_cpu.plan.scenarios import CPU, Scenario, rows, run


@pytest.mark.parametrize("row", rows(2, CPU))
def test_gloo(row: Scenario, group: Group, artifacts: Path, fault: str | None) -> None:
    run(row, CPU, group, artifacts, fault)
