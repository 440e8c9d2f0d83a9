"""The plugin under the Pythons, torches and pytests that this machine has: `nox`, or one combination:
`nox -s "plugin-3.11(torch='2.15.0', pytest='7.3.2')"`.

A Python that is not installed is skipped, and said so. The suite of the plugin's first room runs, with xdist and without: rules,
marks, hooks, ranks, reports; and what is recorded of calls that C++ starts. `make matrix` writes what ran, and with what outcome,
into benchmarks/results/matrix.json.
"""

import json
import os
import runpy
import shutil
import time
from pathlib import Path

import nox

nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = False
PYTHONS = ["3.11", "3.12", "3.13", "3.14"]
TORCH = "2.13.0"  # the Makefile's
# The oldest that is supported, and the newest; torch before 2.9 has no wheel for Python 3.14.
TORCHES = ["2.6.0", TORCH, "2.14.1", "2.15.0"]
PYTESTS = ["7.3.2", "8.4.*", "9.*"]
TESTS = (
    "tests_cpu/diagnosis", "tests_cpu/plugin/test_ranks.py", "tests_cpu/plugin/test_faults.py", "tests_cpu/plugin/test_marks.py",
    "tests_cpu/plugin/test_hooks.py", "tests_cpu/plugin/test_cases.py", "tests_cpu/plugin/test_xdist.py",
    "tests_cpu/plugin/test_programs.py::test_verdicts[started_in_cpp]", "tests_cpu/nsa/test_watched.py",
)  # fmt: skip
USED = """import pytest
import torch
import torch.distributed as dist


@pytest.mark.world_size(2)
def test_two_ranks(group):
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2
"""
RESULTS = Path("benchmarks/results/matrix.json")


@nox.session(python=PYTHONS)
@nox.parametrize("pytest", PYTESTS)
@nox.parametrize("torch", TORCHES)
def plugin(session: nox.Session, torch: str, pytest: str) -> None:
    """Run the plugin's tests under one combination."""
    if session.python == "3.14" and torch == "2.6.0":
        session.skip("torch 2.6 has no wheel for this Python")
    if session.python not in ("3.11", "3.12") and pytest == "7.3.2":
        session.skip("pytest 7.3 does not run under this Python")
    session.install(f"torch=={torch}", "numpy")
    session.install("-e", ".[model,data,xdist]", "hypothesis", "expecttest", f"pytest=={pytest}", f"torch=={torch}")
    began, outcome = time.monotonic(), "failed"
    try:
        session.run("python", "-m", "pytest", *TESTS, "-q", "-n", "2", "-o", "addopts=", *session.posargs)
        outcome = "passed"
    finally:
        _note(
            python=str(session.python),
            torch=torch,
            pytest=pytest,
            outcome=outcome,
            seconds=round(time.monotonic() - began),
        )


@nox.session(python=PYTHONS)
def flow(session: nox.Session) -> None:
    """Record and align control flow, which needs no torch: from Python 3.12 on by sys.monitoring."""
    session.install("pytest", "pytest-timeout")
    alone = ("--noconftest", "-c", os.devnull, "--rootdir", ".", "-p", "no:cacheprovider")
    session.run("python", "-m", "pytest", "tests_cpu/flow", "-q", *alone, env={"PYTHONPATH": "."})


@nox.session
def neighbours(session: nox.Session) -> None:
    """Run ranked tests with plugins that are not in the extra 'test', one at a time: docs/plugins.md."""
    session.install("-e", ".[test]", f"torch=={TORCH}")
    listed = [neighbour.distribution for neighbour in runpy.run_path("benchmarks/neighbours.py")["NEIGHBOURS"]]
    session.install(*dict.fromkeys(listed), "django", f"torch=={TORCH}")
    session.run("python", "benchmarks/neighbours.py", "--json", "benchmarks/results/neighbours.json")
    session.run("python", "benchmarks/neighbours.py", "--table")


@nox.session
def hugging_face(session: nox.Session) -> None:
    """Run the code of docs/hugging_face.md against transformers."""
    session.install("-e", ".[test,hf]", f"torch=={TORCH}")
    session.run("python", "-m", "pytest", "tests_cpu/nsa/test_hugging_face.py", "-m", "slow", *session.posargs)


@nox.session
def package(session: nox.Session) -> None:
    """Build the wheel and the source distribution, check what an index would say of them, and use each where nothing else is."""
    session.install("build", "hatchling", "twine")
    folder = Path(session.create_tmp()).resolve()
    shutil.rmtree(folder / "dist", ignore_errors=True)
    session.run("python", "-m", "build", "--outdir", str(folder / "dist"), silent=True)
    built = sorted(str(p) for p in (folder / "dist").iterdir())
    session.run("python", "-m", "twine", "check", "--strict", *built)
    for number, file in enumerate(built):
        place = folder / f"user{number}"
        session.run("python", "-m", "venv", "--clear", str(place))
        python = str(place / "bin" / "python")
        session.run(python, "-m", "pip", "install", "-q", f"torch=={TORCH}", "numpy", file, external=True)
        (place / "test_ranks.py").write_text(USED, encoding="utf-8")
        (place / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")  # else the folders above configure it
        with session.chdir(place):
            session.run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_ranks.py", external=True)


def _note(**run: object) -> None:
    """Put a run into the table, in place of an earlier one of the same combination."""
    table = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"runs": []}
    same = ("python", "torch", "pytest")
    runs = [r for r in table["runs"] if any(r[name] != run[name] for name in same)]
    runs.append({**run, "date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count()})
    partial = RESULTS.with_suffix(".partial")
    partial.write_text(json.dumps({"runs": sorted(runs, key=lambda r: [r[name] for name in same])}, indent=1) + "\n")
    partial.replace(RESULTS)
