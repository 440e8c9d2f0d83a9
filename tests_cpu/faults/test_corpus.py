"""Every planted fault gets its expected verdict: cause, ranks, and the words where they matter. One run per module.

`make test` plants a fault per kind of evidence (some in tests_cpu/plugin/test_faults.py); `make slow` plants all of them.
tests_cpu/diagnosis/test_recorded.py tests the rules on the evidence of all, in seconds; these tests show that ranks leave it.
"""

from __future__ import annotations

import functools
import importlib
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from pytest_nsa.diagnosis.verdict import Verdict
from pytest_nsa.testing import ExampleResult, run_in
from pytest_nsa.wire.files import read_lines
from tests_cpu import fsdp2
from tests_cpu.faults import questions
from tests_cpu.faults.planting import FAMILIES, Planted, faults_of
from tests_cpu.faults.recorded import record, record_healthy

ROOT = Path(__file__).resolve().parents[2]
MODULES = tuple(path.stem.removeprefix("planted_") for path in sorted(Path(__file__).parent.glob("planted_*.py")))


def planted_module(module: str) -> ModuleType:
    """Return the module of planted faults of that name."""
    return importlib.import_module(f"tests_cpu.faults.planted_{module}")


def faults(module: str) -> dict[str, Planted]:
    """Return the expected verdicts of a module's faults, by test."""
    return faults_of(planted_module(module))


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ExampleResult]:
    """Return the results by module, filled as modules are run."""
    return {}


# In make test: a fault per kind of evidence that tests_cpu/plugin/test_faults.py does not plant. Each module is a session, which
# takes seconds to start.
SAMPLE = {
    ("busy_code", "test_native_code_holds_the_gil"),
    ("hooks_and_recomputation", "test_backward_waits_for_a_backward_in_another_thread"),
    ("loaders", "test_a_loader_s_worker_sleeps"), ("slow_code", "test_a_long_native_call"),
    ("slow_code", "test_one_rank_needs_seconds_for_a_step"), ("waits_and_io", "test_opens_a_fifo"),
    ("waits_and_io", "test_waits_for_a_child"),
}  # fmt: skip
# Together they take minutes of the cores' time: for make slow.
HEAVY = (
    "test_a_long_product", "test_a_compile_that_takes_long", "test_one_rank_is_slow[1_of_2]",
    "test_a_module_with_sixty_thousand_autograd_nodes", "test_a_long_compile_on_one_rank", "test_busy_cores",
    "test_one_rank_is_slow[2_of_4]",  # where the time is up while it waits itself, it is slow and no straggler
    "test_long_python", "test_a_long_forward", "test_uneven_load",
)  # fmt: skip


def chosen(request: pytest.FixtureRequest, module: str) -> list[str]:
    """Return the tests of a module that this session runs."""
    calls = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    found = [call.params for call in calls if call is not None]
    return [params["name"] for params in found if params.get("module") == module]


def run(module: str, names: list[str], folder: Path) -> ExampleResult:
    """Run the named faults of a module. Ranks that stall use no CPU, so several tests at a time do not disturb each other."""
    shutil.copy(ROOT / "tests_cpu" / "faults" / f"planted_{module}.py", folder / "test_planted.py")
    options = ("ranks_hang_after=2.5", "ranks_check_divergence=true", "ranks_timeout=14", f"pythonpath={ROOT}")
    arguments = [a for option in options for a in ("-o", option)]
    tests = [f"test_planted.py::{name}" for name in names]
    return run_in(folder, *workers(names), *arguments, *tests, timeout=280)


def skip_without_fsdp2(verdict: Verdict) -> None:
    """Skip a program that needs FSDP2 where torch's does not run on a CPU: the fixture refuses it, or its first forward fails."""
    reasons = "fully_shard of torch", "no attribute 'record_event'"
    if not fsdp2.HERE and any(reason in verdict.reason for reason in reasons):
        pytest.skip("this torch's FSDP2 does not run on a CPU")


def workers(names: list[str], most: int = 3) -> tuple[str, ...]:
    """Return the options for a session of the named tests: a worker takes as much time to start as a test or two to run."""
    return ("-p", "xdist", "-n", str(min(most, len(names) // 2))) if len(names) > 3 else ()


FAULTS = [
    pytest.param(module, name, marks=() if (module, name) in SAMPLE else pytest.mark.slow)
    for module in MODULES
    for name in faults(module)
]


def test_every_fault_has_a_family_and_an_origin_and_one_home() -> None:
    every = [(name, fault) for module in MODULES for name, fault in faults(module).items()]
    assert len({name for name, _ in every}) == len(every)
    assert {fault.family for _, fault in every} == set(FAMILIES)
    assert all(fault.origin for _, fault in every)


@pytest.mark.parametrize(("module", "name"), FAULTS)
def test_the_verdict(
    module: str, name: str, verdicts: dict[str, ExampleResult], tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    expected = faults(module)[name]
    if expected.needs:
        pytest.importorskip(expected.needs)
    if module not in verdicts:
        folder = tmp_path_factory.mktemp(module)
        names = chosen(request, module)
        verdicts[module] = run(module, names, folder)
        if request.config.getoption("--record"):
            assert names == list(faults(module)), "a module is recorded as a whole: -m 'slow or not slow'"
            assert verdicts[module].run is not None
            record(verdicts[module].run, folder, module, names)
    assert name in verdicts[module].verdicts, verdicts[module].stdout[-3000:]
    verdict = verdicts[module].verdicts[name]
    skip_without_fsdp2(verdict)
    is_right = (verdict.cause, verdict.ranks) == (expected.cause, expected.ranks)
    if expected.miss:  # of the line alone, where cause and ranks are right
        assert is_right or not verdict.certain, verdict.reason
        pytest.xfail(expected.miss)
    assert is_right, (verdict.cause, verdict.ranks, verdict.reason)
    assert expected.allows(verdict.where, planted_module(module)), verdict.where
    assert expected.reason in verdict.reason
    assert verdict.failed


HEALTHY = tuple(path.stem for path in sorted(Path(__file__).parent.glob("healthy_*.py")))


def healthy_tests(module: str) -> list[str]:
    """Return the tests of a module in which nothing is wrong."""
    loaded = importlib.import_module(f"tests_cpu.faults.{module}")
    return [n for n in vars(loaded) if n.startswith("test_")]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Callable[[str], ExampleResult]:
    """Return a function that runs a module once. A suspicion that lasts for 30 s, longer than its tests, would end them."""

    @functools.cache
    def run_module(module: str) -> ExampleResult:
        folder = tmp_path_factory.mktemp(module)
        shutil.copy(ROOT / "tests_cpu" / "faults" / f"{module}.py", folder / "test_healthy.py")
        options = ("ranks_hang_after=30", "ranks_check_divergence=true", f"pythonpath={ROOT}")
        arguments = [a for option in options for a in ("-o", option)]
        names = chosen(request, module)
        tests = [f"test_healthy.py::{name}" for name in names]
        is_recorded = request.config.getoption("--record")
        if is_recorded:
            assert names == healthy_tests(module), "a module is recorded as a whole: -m 'slow or not slow'"
            (folder / "conftest.py").write_text(questions.CONFTEST, encoding="utf-8")
        result = run_in(folder, *workers(names, 2), "--ranks-keep", "all", *arguments, *tests, timeout=280)
        if is_recorded:
            assert result.run is not None
            record_healthy(result.run, folder, module, questions.FOLDER)
        return result

    return run_module


@pytest.mark.parametrize(
    ("module", "name"),
    [
        pytest.param(module, name, marks=() if module == "healthy_pauses" and name not in HEAVY else pytest.mark.slow)
        for module in HEALTHY
        for name in healthy_tests(module)
    ],
)
def test_no_alarm(module: str, name: str, healthy: Callable[[str], ExampleResult]) -> None:
    result = healthy(module)
    verdict = result.verdicts[name]
    skip_without_fsdp2(verdict)
    assert verdict.outcome == "PASS", verdict.reason
    announced = [s for s in read_lines(result.folder(name) / "suspicions.jsonl") if "cause" in s]
    assert not any(s["certain"] for s in announced)
    # A pause is announced once at most, under one cause.
    assert len({(s["cause"], *s["ranks"]) for s in announced}) == len(announced) <= 1, announced
