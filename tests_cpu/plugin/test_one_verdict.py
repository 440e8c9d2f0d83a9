"""One folder has one verdict, in whatever way it is asked for: also where a repository's own rule gives it."""

import json
from pathlib import Path

import pytest

from pytest_nsa.cli.main import main
from pytest_nsa.report.summary import read_entries
from pytest_nsa.testing import HEADER, ExampleResult, run_folder
from tests_cpu.plugin.sessions import read_verdicts, run_under_torchrun
from tests_cpu.sockets import free_port
from tests_cpu.warm import WarmPython

CONFTEST = """
import os
from pytest_nsa.diagnosis.causes import Cause
from pytest_nsa.diagnosis.verdict import Finding

SKEW = Cause(name="clock_skew", chapter="Ours", summary="clocks differ.", advice="set the clocks")

def skewed(evidence):
    hit = [(r.rank, e) for r in evidence.ranks for e in r.exceptions if "clock differs" in e.message]
    return Finding(
        cause="clock_skew", ranks=tuple(rank for rank, _ in hit), where=hit[0][1].where, reason="its clock differs", confidence=0.9,
    ) if hit else None

def pytest_nsa_causes(config):
    return [(SKEW, skewed)]
"""
MARKED = """
def test_it(group):
    if group.rank == 1:
        raise RuntimeError("clock differs by 3 s")
    dist.barrier()
"""
STARTS = """
import torch.multiprocessing as mp

def work(rank, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    if rank == 1:
        raise RuntimeError("clock differs by 3 s")
    dist.barrier()

def test_it():
    mp.spawn(work, (int(os.environ["PORT"]),), nprocs=2)
"""
# Rank 0 waits in native code, until its time limit.
LAUNCHED = """
def test_it():
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 1:
        raise RuntimeError("clock differs by 3 s")
    dist.all_reduce(torch.ones(1))

def test_next():
    dist.barrier()
"""


def write(folder: Path, source: str) -> Path:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_example.py").write_text(HEADER + source)
    return folder


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> ExampleResult:
    """The run of a ranked test of which the repository's rule finds the cause."""
    return run_folder(write(tmp_path_factory.mktemp("marked"), MARKED))


def test_the_terminal_has_the_repository_s_cause(marked: ExampleResult) -> None:
    assert (marked.verdicts["test_it"].cause, marked.verdicts["test_it"].rule) == ("clock_skew", "conftest.skewed")
    assert "rank 1 of 2, clock_skew" in marked.stdout


@pytest.mark.parametrize(
    ("command", "causes"),
    [
        (("diagnose", "{folder}", "--json"), ["clock_skew"]),
        (("diagnose", "{run}", "--json"), ["clock_skew"]),
        (("watch", "--run", "{folder}", "--once", "--json"), ["clock_skew"]),
        # The command has no conftest.py: a new diagnosis is by the rules of the package.
        (("diagnose", "{folder}", "--json", "--again"), ["rank_exception"]),
    ],
)
def test_a_command_has_the_verdict_that_the_folder_records(
    marked: ExampleResult, capsys: pytest.CaptureFixture[str], command: tuple[str, ...], causes: list[str]
) -> None:
    assert main([part.format(folder=marked.folder("test_it"), run=marked.run) for part in command]) == 1
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line.get("verdict", line)["cause"] for line in printed] == causes


def test_a_report_that_is_written_again_has_it(marked: ExampleResult, capsys: pytest.CaptureFixture[str]) -> None:
    (marked.run / "verdicts.jsonl").unlink()  # as of a session that was killed before it wrote its list
    (marked.run / "run.json").unlink()
    assert main(["report", str(marked.run)]) == 1
    assert [entry.verdict.cause for entry in read_entries(marked.run)] == ["clock_skew"]


def test_a_job_that_a_test_starts_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORT", str(free_port()))
    result = run_folder(write(tmp_path, STARTS), "--ranks-descendants=report")
    assert [(v.cause, v.ranks) for v in result.verdicts.values()] == [("clock_skew", (1,))]


@pytest.mark.parametrize(("source", "options"), [(MARKED, ()), (LAUNCHED, ("--timeout=8",))])
def test_under_a_launcher_it_is_the_same(
    warm: WarmPython, tmp_path: Path, source: str, options: tuple[str, ...]
) -> None:
    write(tmp_path, source)
    run_under_torchrun(warm, tmp_path, "-o", "ranks_marks=true", *options)
    assert [(v.cause, v.ranks) for v in read_verdicts(tmp_path).values()] == [("clock_skew", (1,))]
