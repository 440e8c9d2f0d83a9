"""Options, hooks and fixtures of this repository's own suites."""

import argparse
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from pytest_nsa import testing
from pytest_nsa.diagnosis.decision import Decision
from pytest_nsa.diagnosis.verdict import Verdict
from tests_cpu.plan.decision import decide, is_of_the_plan
from tests_cpu.plan.follow import Follow
from tests_cpu.plan.scenarios import BY_VARIABLE, Scenario, ignored_variables
from tests_cpu.warm import WarmPython

pytest_plugins = ["pytester"]
# No test modules, and nothing has imported them yet: what their assertions compare is a failed scenario's reason.
pytest.register_assert_rewrite("tests_cpu.plan.running", "tests_cpu.plan.health")
# Workers of xdist share the cores: threads of torch, as many per worker as there are cores, would spin waiting for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Of tests_cpu/plan/faults.py, which imports torch.
FAULTS = (
    "sel_backward_deadlock", "rank1_skips_allreduce", "gc_reentrant", "rank1_killed", "gate_weight_missing_on_rank1",
    "sel_backward_deadlock_everywhere", "sel_backward_raises", "nsa_backward_deadlock", "mlp_backward_deadlock",
    "recomputation_deadlock", "gate_weight_missing", "inplace_write",
)  # fmt: skip


def _phases(text: str) -> range:
    """Return the phases of '3', '1-5' or 'all'. Raise argparse.ArgumentTypeError for any other text."""
    first, _, last = ("1-99" if text == "all" else text).partition("-")
    if not first.isdigit() or not (last or first).isdigit():
        raise argparse.ArgumentTypeError(f"--phases {text}: must be a number, a range as in 1-5, or all")
    return range(int(first), int(last or first) + 1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fault", choices=FAULTS, help="Plant a fault in every scenario of the plan that it can affect")
    parser.addoption(
        "--fault-rank", type=int, default=1, help="The rank that gets the fault, where one does (default: 1)"
    )
    parser.addoption(
        "--plan-ranks", type=int, default=2, help="Run the plan's scenarios of several ranks on so many (default: 2)"
    )
    parser.addoption(
        "--phases",
        type=_phases,
        help="Run scenarios of the plan alone, of these phases: 3, 1-5 or all (default: all, and other tests)",
    )
    parser.addoption(
        "--plan-follow",
        action="store_true",
        help="Run the row of the plan that the last run's decision names next, and decide over both runs",
    )
    parser.addoption(
        "--real-sizes",
        action="store_true",
        help="Run the plan on a CPU at production's size (a night; -m long for more)",
    )
    parser.addoption(
        "--bisect-mitigations", action="store_true",
        help="Run a failed scenario again with the plan's mitigations, and name the fewest that make it pass",
    )  # fmt: skip
    parser.addoption("--record", action="store_true", help="Keep the evidence of the corpus, for tests_cpu/diagnosis")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Check the options of the plan; have the plugin's ``--ranks-bisect-env`` try the variables of its mitigations."""
    ranks, culprit = config.getoption("--plan-ranks"), config.getoption("--fault-rank")
    if ranks < 2:
        raise pytest.UsageError(f"--plan-ranks {ranks}: scenarios of several ranks need 2 or more")
    if not 0 <= culprit < ranks:
        raise pytest.UsageError(f"--fault-rank {culprit}: the plan has ranks 0 to {ranks - 1} (--plan-ranks {ranks})")
    if config.getoption("--plan-follow"):
        config.pluginmanager.register(Follow(config), "plan-follow")
    if config.getoption("--bisect-mitigations"):
        config.option.nsa_bisect_env = ",".join(f"{name}=1" for name in BY_VARIABLE)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Have -k find a scenario by its other names, too."""
    if (
        isinstance(item, pytest.Function)
        and item.get_closest_marker("scenario") is not None
        and hasattr(item, "callspec")
    ):
        row = item.callspec.params.get("row")
        item.extra_keyword_matches.update(row.other_names if isinstance(row, Scenario) else ())


def pytest_report_collectionfinish(items: list[pytest.Item]) -> list[str]:
    """Report the variables that scenarios leave unused."""
    return ignored_variables() if any(item.get_closest_marker("phase") for item in items) else []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests marked slow or long unless -m names that mark; with --phases all but the scenarios of these phases."""
    phases = config.getoption("--phases")
    unasked = [mark for mark in ("slow", "long") if mark not in config.option.markexpr]

    def is_left_out(item: pytest.Item) -> bool:
        phase = item.get_closest_marker("phase")
        takes_long = any(item.get_closest_marker(mark) is not None for mark in unasked)
        return takes_long or (phases is not None and (phase is None or phase.args[0] not in phases))

    left_out = [item for item in items if is_left_out(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not is_left_out(item)]


@pytest.hookimpl(optionalhook=True)  # -p no:nsa knows no such hook
def pytest_nsa_decide(verdicts: Mapping[str, Verdict]) -> Decision | None:
    """Return the decision of the plan's tree, where scenarios of the plan were run."""
    return decide(verdicts) if is_of_the_plan(verdicts) else None


@pytest.fixture
def fault(request: pytest.FixtureRequest) -> str | None:
    """Return the fault that ``--fault`` plants, None without."""
    return request.config.getoption("--fault")


@pytest.fixture(scope="session", autouse=True)
def warm() -> Iterator[WarmPython]:
    """Run pytest on examples in forks of a process that has imported torch."""
    warm = WarmPython()
    testing.run_pytest = warm.run
    yield warm
    warm.close()


@pytest.fixture(autouse=True)
def _examples_in_order(request: pytest.FixtureRequest) -> None:
    """Run examples in the warm process, without the plugins that our own suite runs without: a test turns one on by -p."""
    if "pytester" not in request.fixturenames:
        return
    pytester = request.getfixturevalue("pytester")  # it clears the variable
    monkeypatch = request.getfixturevalue("monkeypatch")
    off = [option for option in request.config.getini("addopts") if option.startswith("no:")]
    for name in [name for name in os.environ if name.startswith("PYTEST_XDIST_")]:  # an example is no worker of ours
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTEST_ADDOPTS", " ".join(f"-p {option}" for option in off))
    if request.node.get_closest_marker("own_python") is None:
        monkeypatch.setattr(pytester, "runpytest_subprocess", _warm_runs(pytester.path))


def _warm_runs(folder: Path) -> Callable[..., pytest.RunResult]:
    """Return a function that does what pytester's method does, in a fork of the warm process."""
    count = itertools.count()

    def run(*arguments: str | Path, timeout: float | None = None) -> pytest.RunResult:
        base = f"--basetemp={folder / f'runpytest-{next(count)}'}"
        return testing.run_pytest(folder, [base, *map(str, arguments)], timeout or 120)

    return run
