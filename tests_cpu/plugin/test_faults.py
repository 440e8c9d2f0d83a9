"""Real faults in tests on ranks: each is named in bounded time, nothing is left behind, and the next test passes."""

import json
import re
from pathlib import Path

import pytest

from pytest_nsa.cli.main import main
from pytest_nsa.testing import ExampleResult
from tests_cpu.plugin.programs import differences, run_program
from tests_cpu.plugin.sessions import no_process_is_left


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> tuple[ExampleResult, Path]:
    """Run one session over programs/faults.py, three tests at a time, most of which wait for time limits."""
    folder = tmp_path_factory.mktemp("faults")
    return run_program("faults", folder), folder


def test_each_fault_is_named_and_nothing_is_left(faults: tuple[ExampleResult, Path]) -> None:
    result, folder = faults
    assert differences("faults", result) == []
    no_process_is_left(folder)
    assert all(v.duration_s < 30 for v in result.verdicts.values() if v.certain)  # of the 60 that each has


def test_stacks_are_in_the_folder_and_in_the_report(faults: tuple[ExampleResult, Path]) -> None:
    result, _ = faults
    folder = result.folder("test_lock_in_backward")
    for rank in (0, 1):
        assert "most recent call first" in (folder / f"watchdog_stackdump_rank{rank}.txt").read_text()
    assert "stack of rank 1" in result.stdout
    assert "> test_example.py" in result.stdout
    # The dump is taken while the rank is in C++: rank 0 waits inside torch.
    assert "torch" in (folder / "watchdog_stackdump_rank0.txt").read_text()
    assert (folder / "result.txt").read_text() == "HANG\n"


def test_every_file_names_its_schema(faults: tuple[ExampleResult, Path]) -> None:
    result, _ = faults
    folder = result.folder("test_lock_in_backward")
    files = (
        result.run / "env.json",
        result.run / "decision.json",
        folder / "job.json",
        folder / "rank1" / "stall.json",
    )
    assert [json.loads(file.read_text())["schema"] for file in (*files, folder / "verdict.json")] == [1, 1, 1, 1, 2]
    assert json.loads((folder / "rank1" / "board.bin").read_bytes().partition(b"\0")[0])["schema"] >= 3


def test_missing_parameters_are_those_of_the_interrupted_backward(faults: tuple[ExampleResult, Path]) -> None:
    assert faults[0].verdicts["test_lock_in_backward"].parameters_missing == ("0.weight", "0.bias")
    assert faults[0].verdicts["test_raises"].parameters_missing == ()


def test_the_verdict_of_a_hang_has_a_word_on_memory(faults: tuple[ExampleResult, Path]) -> None:
    for name in ("test_lock_in_backward", "test_skips_collective"):
        (fact,) = [fact for fact in faults[0].verdicts[name].evidence if fact.kind == "memory"]
        assert re.fullmatch(r".*ranks? .*held [\d,]+ MiB, of [\d,]+ MiB here: memory is not short", fact.text), (
            fact.text
        )
    assert [fact for fact in faults[0].verdicts["test_raises"].evidence if fact.kind == "memory"] == []
    assert "memory is not short" not in faults[0].stdout
    assert re.search(r"^- memory: .* held ", (faults[0].run / "SUMMARY.md").read_text(), re.M)  # type: ignore[operator]


def test_traces_log_of_a_stall_has_what_the_tracer_could_not_print(faults: tuple[ExampleResult, Path]) -> None:
    """`grep MISSING artifacts/*/traces.log`, as the plan's readers do."""
    text = (faults[0].folder("test_lock_in_backward") / "traces.log").read_text()
    assert [line for line in text.splitlines() if "- MISSING: " in line] == [
        "[rank 1]   - MISSING: 0.weight",
        "[rank 1]   - MISSING: 0.bias",
    ]


def test_diagnose_gives_the_same_from_the_folder(
    faults: tuple[ExampleResult, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diagnose", str(faults[0].run)]) == 1
    printed = capsys.readouterr().out.split("\n\n")
    blocks = {block.partition("\n")[0].rpartition("::")[2]: block for block in printed}
    for name, verdict in faults[0].verdicts.items():
        assert not verdict.failed or (f"{verdict.outcome}: " in blocks[name] and verdict.cause in blocks[name])
