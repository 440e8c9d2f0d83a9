"""CPU seconds of a passing two-rank test, from the bare floor to pytest-nsa, all ways taking turns.

    python benchmarks/rank_cost.py --rounds 3 --json benchmarks/results/rank_cost.json

What is done:

- floor: two forks of a process that has torch, a gloo group over a FileStore, one all_reduce, exit;
- collected: the process that forks is a pytest that has collected the tests, as the zygote is;
- protocol: each child runs its test by `pytest_runtest_protocol`, with the fixtures and plugins that this takes;
- plain: a test without ranks, as the host of a ranked test runs it, too;
- pytest-nsa: all of that, and evidence is kept and read;
- pytest-nsa, reuse: the same with ranks that stay.

A figure is the CPU time of all processes of a run of 104 tests (of quick ones, more) less that of 4, divided by 100: what a session
costs once is in both. Time by the clock varies with what else the machine does; CPU time does so less.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from figures import keep, parser_of

FEW, MANY = 4, 104  # tests
MORE = {"plain": 1004, "pytest-nsa, reuse": 304}  # of what is quick: the start of a session varies by half a second
TEST = """\
import pytest
import torch
import torch.distributed as dist
{imports}

{mark}class TestTrivial:
    @pytest.mark.parametrize("n", range({count}))
    {ranked}def test_it(self, group, n):
        if group is None:  # a test without ranks
            return
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == 2
"""
# A plugin of a few lines: what runs tests on forked ranks by pytest's own protocol cannot do less.
BARE = """\
import gc
import os

import pytest
import torch
import torch.distributed as dist

STEP, STORE = os.environ["STEP"], os.environ["STORE"]
failed = 0


def join(rank, number):
    store = dist.FileStore(STORE + str(number), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)


@pytest.fixture
def group(n):
    if STEP == "plain":
        return None
    join(int(os.environ["RANK"]), n)
    return dist.group.WORLD


def bare(rank, number):
    join(rank, number)
    total = torch.ones(1)
    dist.all_reduce(total)
    return int(total.item() != 2)


def by_protocol(item, rank):
    os.environ["RANK"] = str(rank)
    item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
    return failed


def pytest_runtest_logreport(report):
    global failed
    failed += not report.passed


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    torch.set_num_threads(1)
    if STEP == "plain":
        return None
    session.config.pluginmanager.getplugin("capturemanager").suspend_global_capture(in_=True)
    session.config.pluginmanager.unregister(name="terminalreporter")
    gc.freeze()
    for number, item in enumerate(session.items):
        pids = []
        for rank in range(2):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    code = bare(rank, number) if STEP == "collected" else by_protocol(item, rank)
                finally:
                    os._exit(code)
            pids.append(pid)
        for pid in pids:
            assert os.waitpid(pid, 0)[1] == 0
    return True
"""
FLOOR = """\
import gc, os, sys
import torch
import torch.distributed as dist

torch.set_num_threads(1)
gc.freeze()
for n in range({count}):
    pids = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            dist.init_process_group("gloo", store=dist.FileStore(os.environ["STORE"] + str(n), 2), rank=rank, world_size=2)
            total = torch.ones(1)
            dist.all_reduce(total)
            os._exit(int(total.item() != 2))
        pids.append(pid)
    for pid in pids:
        assert os.waitpid(pid, 0)[1] == 0
"""
OURS = {
    "imports": "from pytest_nsa import reuse, world_size\n",
    "mark": "",
    "ranked": "@world_size(2)\n    ",
}
STEPS = ("floor", "collected", "protocol", "plain", "pytest-nsa", "pytest-nsa, reuse")


def cost(step: str, count: int) -> tuple[float, float, int]:
    """Return the user and system seconds and the minor faults of all processes of a run of ``count`` tests.

    Raises RuntimeError with its output where the run fails.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "STEP": step, "STORE": f"{folder}/store"}
        pytest = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:randomly",
            "test_trivial.py",
        ]
        if step == "floor":
            command = [sys.executable, "-c", FLOOR.format(count=count)]
        elif step.startswith("pytest-nsa"):
            ours = OURS | ({"mark": "@reuse\n"} if step.endswith("reuse") else {})
            (folder / "test_trivial.py").write_text(TEST.format(count=count, **ours))
            command = pytest
        else:
            (folder / "test_trivial.py").write_text(TEST.format(count=count, imports="", mark="", ranked=""))
            (folder / "conftest.py").write_text(BARE)
            command = [*pytest, "-p", "no:nsa"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode not in (0, 5):  # 5: pytest itself has run no test
            raise RuntimeError(f"{step}:\n{done.stdout}{done.stderr}")
        return after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime, after.ru_minflt - before.ru_minflt


def measure(rounds: int) -> dict[str, dict[str, float]]:
    """Return the medians of each step: milliseconds of CPU time, of it in the kernel, and minor faults, for a test."""
    found: dict[str, list[tuple[float, float, float]]] = {step: [] for step in STEPS}
    for number in range(rounds):
        for step in STEPS:
            tests = MORE.get(step, MANY)
            few, many = cost(step, FEW), cost(step, tests)
            user, system, faults = ((m - f) / (tests - FEW) for m, f in zip(many, few, strict=True))
            found[step].append((1e3 * (user + system), 1e3 * system, faults))
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    names = ("cpu_ms", "system_ms", "minor_faults")
    return {
        step: {
            name: round(statistics.median(column), 1)
            for name, column in zip(names, zip(*rows, strict=True), strict=True)
        }
        for step, rows in found.items()
    }


def main() -> None:
    """Measure, print, and keep what was measured."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="how often the ways take turns (default: 3)")
    arguments = parser.parse_args()
    found = measure(arguments.rounds)
    print("| a two-rank test | ms of CPU time | in the kernel | minor faults | of the floor |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for step, of in found.items():
        ratio = of["cpu_ms"] / found["floor"]["cpu_ms"]
        print(f"| {step} | {of['cpu_ms']:.1f} | {of['system_ms']:.1f} | {of['minor_faults']:.0f} | {ratio:.2f} |")
    keep({"steps": found}, arguments.json)


if __name__ == "__main__":
    main()
