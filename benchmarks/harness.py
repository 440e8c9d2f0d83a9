"""What a trivial two-rank gloo test costs with pytest-nsa and with its peers, beside the bare floor, interleaved in one run.

A test = start two ranks, form the group, one all_reduce, assert, report. The floor = fork two children of a process that has
torch, FileStore, gloo, all_reduce, exit. Peers that are not installed are left out, and reported.

    python benchmarks/harness.py --rounds 5 --json benchmarks/results/harness.json

`--check` measures no time: it counts what a busy machine does not change, and compares it with what
benchmarks/results/harness_counts.json has. `--cpu --json benchmarks/results/rank_cost.json` measures CPU time (counts.py).

The times of pytest-nsa, MultiProcessTestCase and MultiProcContinuousTest are those of each test but the first, which waits for
imports and ranks. Those of torchrun and spawn are whole, as every test pays them.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import counts
import torch
import torch.distributed as dist
from figures import keep, parser_of

HERE = Path(__file__).parent
OURS = """\
import pytest, torch
import torch.distributed as dist
from pytest_nsa import reuse, world_size

class TestTrivial:
    @pytest.mark.parametrize("n", range({count}))
    @world_size(2)
    def test_it(self, group, n):
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == 2
"""


def floor(folder: Path, count: int) -> list[float]:
    """Return the seconds in which two forked children form a gloo group, reduce once and exit, ``count`` times."""
    return [_floor_once(folder) for _ in range(count)]


def _floor_once(folder: Path) -> float:
    started = time.perf_counter()
    store = str(folder / f"store{time.monotonic_ns()}")
    children = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
                total = torch.ones(1)
                dist.all_reduce(total)
                code = int(total.item() != 2)
            finally:
                os._exit(code)
        children.append(pid)
    for pid in children:
        assert os.waitpid(pid, 0)[1] == 0
    return time.perf_counter() - started


def _pytest(folder: Path, source: str, *arguments: str) -> list[float]:
    """Return the seconds of each test but the first, as pytest itself reports them."""
    (folder / "test_trivial.py").write_text(source)
    report = folder / "report.xml"
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", f"--junitxml={report}",
         "test_trivial.py", *arguments],
        cwd=folder, check=True, capture_output=True,
    )  # fmt: skip
    return [float(case.get("time", "nan")) for case in ElementTree.parse(report).iter("testcase")][1:]


def ours(folder: Path, count: int) -> list[float]:
    """Measure fresh ranks for every test."""
    return _pytest(folder, OURS.format(count=count + 1))


def ours_not_ahead(folder: Path, count: int) -> list[float]:
    """Measure fresh ranks, forked when their test begins."""
    return _pytest(folder, OURS.format(count=count + 1), "-o", "ranks_ahead=false")


def ours_reused(folder: Path, count: int) -> list[float]:
    """Measure the mark ``reuse``: one worker group for the class."""
    return _pytest(folder, OURS.format(count=count + 1).replace("class Test", "@reuse\nclass Test"))


def ours_fresh(folder: Path, count: int) -> list[float]:
    """Measure the mark ``reuse(group='fresh')``: one worker group for the class, a process group for each test."""
    return _pytest(folder, OURS.format(count=count + 1).replace("class Test", "@reuse(group='fresh')\nclass Test"))


def _script(name: str, *arguments: str) -> list[float]:
    """Run a peer's script, and return the JSON list of seconds that it prints as its last line."""
    done = subprocess.run(
        [sys.executable, str(HERE / "peers" / name), *arguments], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def spawn(folder: Path, count: int) -> list[float]:
    """Measure torch.multiprocessing.spawn."""
    return _script("spawn.py", str(count))


def multi_process_test_case(folder: Path, count: int) -> list[float]:
    """Measure torch.testing._internal.common_distributed.MultiProcessTestCase, with which torch tests itself."""
    return _script("torch_test_cases.py", "MultiProcessTestCase", str(count + 1))[1:]


def multi_proc_continuous_test(folder: Path, count: int) -> list[float]:
    """Measure MultiProcContinuousTest: ranks that stay for a class."""
    return _script("torch_test_cases.py", "MultiProcContinuousTest", str(count + 1))[1:]


def torchrun(folder: Path, count: int) -> list[float]:
    """Measure torchrun in a subprocess for every test."""
    times = []
    for _ in range(count):
        started = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=0", "--rdzv-backend=c10d",
             "--rdzv-endpoint=localhost:0", str(HERE / "peers" / "trivial_rank.py")],
            check=True, capture_output=True,
        )  # fmt: skip
        times.append(time.perf_counter() - started)
    return times


def deepspeed_pattern(folder: Path, count: int) -> list[float]:
    """Measure a forkserver pool for every test, as DeepSpeed's DistributedTest makes; a substitute written for this benchmark."""
    return _script("forkserver_pool.py", str(count))


Way = Callable[[Path, int], list[float]]
# Name, way, and its number of tests per round: few where they are expensive.
WAYS: tuple[tuple[str, Way, int], ...] = (
    ("floor", floor, 20),
    ("pytest-nsa", ours, 20),
    ("pytest-nsa, ranks_ahead=false", ours_not_ahead, 20),
    ("pytest-nsa, reuse", ours_reused, 20),
    ("pytest-nsa, reuse, fresh group", ours_fresh, 20),
    ("MultiProcContinuousTest", multi_proc_continuous_test, 3),
    ("MultiProcessTestCase", multi_process_test_case, 1),
    ("torch.multiprocessing.spawn", spawn, 2),
    ("torchrun in a subprocess", torchrun, 1),
    ("forkserver pool (DeepSpeed's pattern)", deepspeed_pattern, 1),
)


def measure(rounds: int, only: str | None) -> tuple[dict[str, list[float]], dict[str, list[str]]]:
    """Return seconds per test by way, and what ended a way's turn early. All ways take their turn in each round."""
    times: dict[str, list[float]] = {}
    failed: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _floor_once(folder)
        for number in range(rounds):
            for way, run, count in WAYS:
                if (way in failed and way not in times) or (
                    only and only not in way and way not in ("floor", "pytest-nsa")
                ):
                    continue
                try:
                    times.setdefault(way, []).extend(run(folder, count))
                except subprocess.CalledProcessError as error:
                    said = (error.stderr or "").strip().splitlines()[-1:] or [str(error)]
                    failed.setdefault(way, []).append(said[0][:200])
                print(f"round {number + 1}: {way}", file=sys.stderr, flush=True)
    return times, failed


def main() -> None:
    """Measure, print, and keep what was measured."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="how often the ways take turns (default: 3)")
    parser.add_argument("--only", help="measure only ways whose name holds this, beside the floor and pytest-nsa")
    parser.add_argument(
        "--check", action="store_true", help="count, compare with harness_counts.json, and fail where a row is worse"
    )
    parser.add_argument("--count", action="store_true", help="count, and write harness_counts.json")
    parser.add_argument("--cpu", action="store_true", help="measure CPU time, from the floor to pytest-nsa")
    arguments = parser.parse_args()
    if arguments.check or arguments.count:
        sys.exit(counts.check() if arguments.check else counts.write())
    if arguments.cpu:
        keep({"steps": counts.cpu_times(arguments.rounds)}, arguments.json)
        return
    torch.set_num_threads(1)
    times, failed = measure(arguments.rounds, arguments.only)
    medians = {way: statistics.median(found) for way, found in times.items() if found}
    ways = {
        way: {
            "median_ms": 1e3 * medians[way], "min_ms": 1e3 * min(times[way]), "max_ms": 1e3 * max(times[way]),
            "n": len(times[way]), "of_floor": medians[way] / medians["floor"], "of_ours": medians[way] / medians["pytest-nsa"],
        }
        for way in medians
    }  # fmt: skip
    print("| a two-rank test with | median ms | min | max | n | of the floor | of pytest-nsa |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for way, f in ways.items():
        print(
            f"| {way} | {f['median_ms']:.0f} | {f['min_ms']:.0f} | {f['max_ms']:.0f} | {f['n']} "
            f"| {f['of_floor']:.2f} | {f['of_ours']:.2f} |"
        )
    for way, why in failed.items():
        print(f"{way}: failed in {len(why)} of {arguments.rounds} rounds: {why[0]}")
    keep({"ways": ways, "failed": failed}, arguments.json)


if __name__ == "__main__":
    main()
