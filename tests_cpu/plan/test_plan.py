"""The plan on a CPU: a test per row of `scenarios.TABLE`.

``--phases 1-5`` runs only these phases, ``--real-sizes`` all at production's size, ``--plan-ranks 4`` on four ranks.
"""

from dataclasses import replace
from pathlib import Path

import pytest

import nsa.training.metrics
import nsa.training.trainer  # noqa: F401  (ranks are forked from the process that collects: else each imports it, for a second)
from pytest_nsa.fixtures import Group
from pytest_nsa.marks import LayerRange
from tests_cpu.plan.running import bisected, run
from tests_cpu.plan.scenarios import CPU, REAL_ON_CPU, Scenario, Size, rows


def get_size(config: pytest.Config) -> Size:
    """Return the small model's size, or with ``--real-sizes`` production's."""
    size = REAL_ON_CPU if config.getoption("--real-sizes") else CPU
    return replace(size, num_ranks=config.getoption("--plan-ranks"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("row", rows(get_size(metafunc.config)))


def test_scenario(
    row: Scenario,
    group: Group,
    artifacts: Path,
    fault: str | None,
    branch: str | None,
    gc_range: LayerRange | None,
    pytestconfig: pytest.Config,
) -> None:
    culprit = pytestconfig.getoption("--fault-rank")
    run(row, get_size(pytestconfig), group, artifacts, fault, culprit, bisected(branch, gc_range))
