"""A harness for tests of ranked tests: files in, verdicts out. For this project's suite, and for plugins built on it::

def test_my_fixture(pytester):
    result = run_example(pytester, "@world_size(2)\\ndef test_it(group): assert group.world_size == 2")
    assert result.outcomes == {"passed": 1}
"""

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from pytest_nsa.diagnosis.verdict import Verdict

HEADER = """\
import os, signal, sys, threading, time
import pytest, torch
import torch.distributed as dist
from pytest_nsa import *
"""


ONCE = ("-o", "ranks_rerun=off")  # an argument --ranks-rerun wins


@dataclass(frozen=True, kw_only=True)
class ExampleResult:
    """What a run gave: pytest's counts, its output and exit code, and the verdict of each test on ranks that left one."""

    outcomes: dict[str, int]
    returncode: int
    stdout: str
    stderr: str
    run: Path | None
    verdicts: dict[str, Verdict]

    def folder(self, name: str) -> Path:
        """Return the folder of the test whose id ends in ``name``."""
        assert self.run is not None
        entries = [json.loads(line) for line in (self.run / "verdicts.jsonl").read_text().splitlines()]
        return self.run / next(e["folder"] for e in entries if e["nodeid"].endswith(name) or e.get("scenario") == name)


def run_example(
    pytester: pytest.Pytester, source: str, *arguments: str, name: str = "test_example.py", timeout: float = 120
) -> ExampleResult:
    """Write HEADER and ``source`` as a test module, run pytest on it in a separate process, and read the results."""
    pytester.path.joinpath(name).write_text(HEADER + textwrap.dedent(source), encoding="utf-8")
    options = (
        *ONCE,
        "-p",
        "no:cacheprovider",
        f"--basetemp={pytester.path / 'runpytest'}",
        f"--rootdir={pytester.path}",
    )
    return read_result(pytester.path, run_pytest(pytester.path, [*options, *arguments], timeout))


def run_folder(folder: Path, *arguments: str, timeout: float = 170) -> ExampleResult:
    """Run pytest on the files in ``folder``, in order: for a fixture of module scope, which cannot use pytester."""
    options = (*ONCE, "-p", "no:cacheprovider", "-p", "no:randomly", "--rootdir", str(folder))
    return read_result(folder, run_pytest(folder, [*options, *arguments], timeout))


def start_pytest(folder: Path, arguments: Sequence[str], timeout: float) -> pytest.RunResult:
    """Run pytest in ``folder`` in a separate process. Raises subprocess.TimeoutExpired."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=folder,
        text=True,
        capture_output=True,
        timeout=timeout,
        check=False,
    )
    print(done.stdout, done.stderr, sep="\n")  # for the report of a test that fails
    return pytest.RunResult(done.returncode, done.stdout.splitlines(), done.stderr.splitlines(), 0)


# A suite may put something faster in its place, such as a process that has imported torch and forks.
run_pytest: Callable[[Path, Sequence[str], float], pytest.RunResult] = start_pytest


def read_result(folder: Path, result: pytest.RunResult) -> ExampleResult:
    """Return the result of any run in ``folder``; verdicts by the test's name without its file."""
    latest = folder / "artifacts" / "latest"
    run = latest.resolve() if latest.exists() else None
    verdicts = {}
    if run is not None and (run / "verdicts.jsonl").is_file():
        for line in (run / "verdicts.jsonl").read_text(encoding="utf-8").splitlines():
            verdict = Verdict.from_json(json.loads(line))
            verdicts[verdict.nodeid.partition("::")[2]] = verdict
    try:
        outcomes = result.parseoutcomes()
    except ValueError:  # the run printed no closing line
        outcomes = {}
    return ExampleResult(
        outcomes=outcomes,
        returncode=int(result.ret),
        stdout=result.stdout.str(),
        stderr=result.stderr.str(),
        run=run,
        verdicts=verdicts,
    )
