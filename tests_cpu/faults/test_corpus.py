"""The programs of the corpus, live: each fault gets the verdict of its row, and its healthy twin passes without an announcement.

`make test` plants a fault per kind of evidence (some in tests_cpu/plugin/test_faults.py); `make slow` plants all, and runs twins.
tests_cpu/diagnosis/test_recorded.py tests the rules on the evidence of every row, in seconds; these tests show that ranks leave it.
With `--record` a fault's evidence becomes the archive of its row.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import pytest

from pytest_nsa.diagnosis.verdict import Verdict
from pytest_nsa.testing import ExampleResult, run_folder
from pytest_nsa.wire.files import read_lines
from tests_cpu import fsdp2
from tests_cpu.faults import questions
from tests_cpu.faults.planting import Program, marked_lines, programs_of
from tests_cpu.faults.recorded import ARCHIVES, pack
from tests_cpu.faults.recorded import HEALTHY as MOMENTS
from tests_cpu.faults.rows import FAMILIES, PLANTED, Fault, read_rows, update_row

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PROGRAMS = tuple(path.stem for path in sorted((HERE / "programs").glob("*.py")) if path.stem != "__init__")
HEALTHY = tuple(path.stem for path in sorted(HERE.glob("healthy_*.py")))
# In make test: a fault per kind of evidence that tests_cpu/plugin/test_faults.py does not plant.
SAMPLE = {
    "test_native_code_holds_the_gil", "test_backward_waits_for_a_backward_in_another_thread", "test_a_loader_s_worker_sleeps",
    "test_a_long_native_call", "test_one_rank_needs_seconds_for_a_step", "test_opens_a_fifo", "test_waits_for_a_child",
}  # fmt: skip
# Together they take minutes of the cores' time: for make slow.
HEAVY = (
    "test_a_long_product", "test_a_compile_that_takes_long", "test_a_module_with_sixty_thousand_autograd_nodes",
    "test_a_long_compile_on_one_rank", "test_busy_cores", "test_long_python", "test_a_long_forward", "test_uneven_load",
)  # fmt: skip


def load_file(file: str) -> ModuleType:
    """Return the module of a family's programs."""
    return importlib.import_module(f"tests_cpu.faults.programs.{file}")


@functools.cache
def rows_by_program() -> dict[str, Fault]:
    """Return the row of each program, by the program's test."""
    return {row.program or row.test: row for row in read_rows()}


def list_programs() -> list[tuple[str, str, Program]]:
    """Return (file, test, program) of each live program."""
    return [(file, name, program) for file in PROGRAMS for name, program in programs_of(load_file(file)).items()]


@dataclass(frozen=True, slots=True)
class Way:
    """A way to run a file of programs: its test here, the lines of conftest.py, pytest's options, and the workers."""

    function: str
    conftest: str
    options: tuple[str, ...]
    workers: int


FROM_PLANTING = "from tests_cpu.faults.planting import culprit, {}\n"
AS_FAULTS = Way("test_the_verdict", FROM_PLANTING.format("with_fault"), ("ranks_hang_after=2.5", "ranks_timeout=14"), 3)
# A suspicion that lasts for 30 s, longer than these tests, would end them.
AS_TWINS = Way("test_no_alarm_in_a_twin", FROM_PLANTING.format("without_fault"), ("ranks_hang_after=30",), 2)
AS_HEALTHY = Way("test_no_alarm", "", ("ranks_hang_after=30",), 2)
Run = Callable[[Way], ExampleResult]
A_SESSION_S = 1500  # of all programs in one way, on a busy machine
pytestmark = pytest.mark.timeout(A_SESSION_S + 60)  # the first test of each way waits for them


def run_programs(
    folder: Path, way: Way, programs: Sequence[tuple[str, str]], *arguments: str, workers: int, timeout: float
) -> ExampleResult:
    """Run ``programs``, as (file, test), in ``folder``, in one session with at most ``workers`` of xdist."""
    is_healthy = way.function == AS_HEALTHY.function
    copies = {file: f"test_{file}.py" if is_healthy else f"{PLANTED}_{file}.py" for file, _ in programs}
    for file, copied in copies.items():
        shutil.copy(HERE / f"{file}.py" if is_healthy else HERE / "programs" / f"{file}.py", folder / copied)
    (folder / "conftest.py").write_text(way.conftest)
    options = (*way.options, "ranks_check_divergence=true", f"pythonpath={ROOT}")
    words = [word for option in options for word in ("-o", option)]
    # A worker takes as much time to start as a test or two to run.
    spread = ("-p", "xdist", "-n", str(min(workers, len(programs) // 2))) if len(programs) > 3 else ()
    tests = (f"{copies[file]}::{name}" for file, name in programs)
    return run_folder(folder, *spread, *words, *arguments, *tests, timeout=timeout)


@pytest.fixture(scope="module")
def run_all(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Run:
    """Return a function that runs those programs that this session asks for in one way, once.

    Ranks that stall use no CPU, so several tests at a time do not disturb each other.
    """
    is_recorded = request.config.getoption("--record")

    @functools.cache
    def run(way: Way) -> ExampleResult:
        calls = [i.callspec.params for i in request.session.items if getattr(i, "originalname", "") == way.function]  # type: ignore[attr-defined]
        programs = [(params["file"], params["name"]) for params in calls]
        folder = tmp_path_factory.mktemp(way.function)
        is_healthy = way is AS_HEALTHY
        asking = replace(way, conftest=questions.CONFTEST) if is_healthy and is_recorded else way
        arguments = ("--ranks-keep", "all", *(("--ranks-rerun", "all") if is_recorded and not is_healthy else ()))
        result = run_programs(folder, asking, programs, *arguments, workers=way.workers, timeout=A_SESSION_S)
        for file in dict.fromkeys(file for file, _ in programs) if is_healthy and is_recorded else ():
            of_file = [name for of, name in programs if of == file]
            assert of_file == healthy_tests(file), "a module is recorded as a whole: -m 'slow or not slow'"
            asked = {name: result.folder(name) / questions.FOLDER for name in sorted(of_file)}
            asked = {name: path for name, path in asked.items() if path.is_dir()}
            if asked:
                pack(MOMENTS / f"{file}.tar.xz", asked, folder)
        return result

    return run


def skip_without_fsdp2(verdict: Verdict) -> None:
    """Skip a program that needs FSDP2 where torch's does not run on a CPU: the fixture refuses it, or its first forward fails."""
    reasons = "fully_shard of torch", "no attribute 'record_event'"
    if not fsdp2.HERE and any(reason in verdict.reason for reason in reasons):
        pytest.skip("this torch's FSDP2 does not run on a CPU")


def healthy_tests(module: str) -> list[str]:
    """Return the tests of a module in which nothing is wrong."""
    loaded = importlib.import_module(f"tests_cpu.faults.{module}")
    return [n for n in vars(loaded) if n.startswith("test_")]


def test_every_row_has_a_family_and_an_origin_and_one_home() -> None:
    rows = read_rows()
    assert len({row.test for row in rows}) == len(rows)
    assert {row.family for row in rows} == set(FAMILIES)
    assert all(row.origin for row in rows)


def test_every_program_is_in_the_file_of_its_family() -> None:
    found = {(name, file.split("_of_")[0]) for file, name, _ in list_programs()}
    assert found == {(name, rows_by_program()[name].family) for name, _ in found}


def test_every_program_has_a_twin() -> None:
    takes = {name: inspect.signature(getattr(load_file(file), name)).parameters for file, name, _ in list_programs()}
    for _, name, program in list_programs():
        assert ("faulty" if program.rank is None else "culprit") in takes[name], name


@pytest.mark.xdist_group("faults")  # one worker runs the session of a way
@pytest.mark.parametrize(
    ("file", "name"),
    [
        pytest.param(file, name, id=name, marks=() if name in SAMPLE else pytest.mark.slow)
        for file, name, _ in list_programs()
    ],
)
def test_the_verdict(file: str, name: str, run_all: Run, request: pytest.FixtureRequest) -> None:
    row = rows_by_program()[name]
    if row.needs:
        pytest.importorskip(row.needs)
    result = run_all(AS_FAULTS)
    assert name in result.verdicts, result.stdout[-3000:]
    verdict = result.verdicts[name]
    skip_without_fsdp2(verdict)
    lines = marked_lines(HERE / "programs" / f"{file}.py")
    if request.config.getoption("--record"):
        assert result.run is not None
        pack(ARCHIVES / f"{name}.tar.xz", {name: result.folder(name)}, result.run.parents[1])
        of_file = {"archive": name, "test": name, "program": "", "lines": sorted(lines) if row.lines else []}
        update_row(name, **of_file, divergence=dict(verdict.first_divergence))
    is_right = row.names(verdict.cause, verdict.ranks)
    if row.miss:  # of the line alone, where cause and ranks are right
        assert is_right or not verdict.certain, verdict.reason
        pytest.xfail(row.miss)
    assert is_right, (verdict.cause, verdict.ranks, verdict.reason)
    assert row.allows(verdict.where, lines), verdict.where
    assert row.reason in verdict.explanation or verdict.first_divergence  # a recorded program has run twice
    assert verdict.failed


def assert_no_alarm(result: ExampleResult, name: str) -> None:
    """Assert that a test passed, and that at most one pause was announced, once, under one cause."""
    verdict = result.verdicts[name]
    skip_without_fsdp2(verdict)
    assert verdict.outcome == "PASS", verdict.reason
    announced = [s for s in read_lines(result.folder(name) / "suspicions.jsonl") if "cause" in s]
    assert not any(s["certain"] for s in announced)
    assert len({(s["cause"], *s["ranks"]) for s in announced}) == len(announced) <= 1, announced


@pytest.mark.slow
@pytest.mark.xdist_group("twins")
@pytest.mark.parametrize(
    ("file", "name"),
    [pytest.param(file, name, id=name) for file, name, _ in list_programs()],
)
def test_no_alarm_in_a_twin(file: str, name: str, run_all: Run) -> None:
    needs = rows_by_program()[name].needs
    if needs:
        pytest.importorskip(needs)
    assert_no_alarm(run_all(AS_TWINS), name)


@pytest.mark.xdist_group("healthy")
@pytest.mark.parametrize(
    ("file", "name"),
    [
        pytest.param(file, name, marks=() if file == "healthy_pauses" and name not in HEAVY else pytest.mark.slow)
        for file in HEALTHY
        for name in healthy_tests(file)
    ],
)
def test_no_alarm(file: str, name: str, run_all: Run) -> None:
    assert_no_alarm(run_all(AS_HEALTHY), name)
