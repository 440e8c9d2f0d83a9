"""The plan at production size, from the table that the CPU suite runs; ``--plan-ranks`` and ``--fault-rank`` as there."""

from dataclasses import replace
from pathlib import Path

import pytest

from pytest_nsa import rank_env
from pytest_nsa.fixtures import Group
from pytest_nsa.marks import LayerRange
from tests_cpu.plan.running import bisected, run
from tests_cpu.plan.scenarios import GPU, Scenario, Size, rows


def size_of(config: pytest.Config) -> Size:
    return replace(GPU, num_ranks=config.getoption("--plan-ranks"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("row", rows(size_of(metafunc.config)))


@rank_env(TORCH_FR_BUFFER_SIZE="2000")  # a rank that stalls leaves a dump of torch's flight recorder
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
    run(row, size_of(pytestconfig), group, artifacts, fault, culprit, bisected(branch, gc_range))
