"""Options of this repository's own suites."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_nsa import testing
from tests_cpu.warm import WarmPython

pytest_plugins = ["pytester"]

FAULTS = ("sel_backward_deadlock", "rank1_skips_allreduce", "gc_reentrant", "rank1_killed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fault", choices=FAULTS, help="Plant a fault in every scenario of the plan that it can affect")
    parser.addoption("--record", action="store_true", help="Keep the evidence of the corpus, for tests_cpu/diagnosis")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked slow run where -m asks for them (make slow)."""
    if "slow" in config.option.markexpr:
        return
    slow = [item for item in items if item.get_closest_marker("slow") is not None]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item.get_closest_marker("slow") is None]


@pytest.fixture
def fault(request: pytest.FixtureRequest) -> str | None:
    """The fault that ``--fault`` plants, None without."""
    return request.config.getoption("--fault")


@pytest.fixture(scope="session", autouse=True)
def warm() -> Iterator[WarmPython]:
    """Runs of pytest on examples are forks of a process that has imported torch."""
    warm = WarmPython()
    testing.run_pytest = warm.run
    yield warm
    warm.close()


@pytest.fixture(autouse=True)
def _examples_in_order(request: pytest.FixtureRequest) -> None:
    """Tests that run pytest on an example want its tests in order: pytest-randomly is on only where they ask for it."""
    if "pytester" not in request.fixturenames:
        return
    pytester = request.getfixturevalue("pytester")  # which clears the variable
    monkeypatch = request.getfixturevalue("monkeypatch")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:randomly")
    if request.node.get_closest_marker("own_python") is None:
        monkeypatch.setattr(pytester, "runpytest_subprocess", _warm_runs(pytester.path))


def _warm_runs(folder: Path) -> Callable[..., pytest.RunResult]:
    """What pytester's method does, in a fork of the warm process."""
    count = itertools.count()

    def run(*arguments: str | Path, timeout: float | None = None) -> pytest.RunResult:
        base = f"--basetemp={folder / f'runpytest-{next(count)}'}"
        return testing.run_pytest(folder, [base, *map(str, arguments)], timeout or 120)

    return run
