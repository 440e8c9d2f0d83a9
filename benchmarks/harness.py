"""What a trivial two-rank gloo test costs with pytest-nsa and with its peers, beside the bare floor, interleaved in one run.

A test = start two ranks, form the group, one all_reduce, assert, report. The floor = fork two children of a process that has
torch, FileStore, gloo, all_reduce, exit (peers/trivial.py). Peers that are not installed are left out, and reported.

    python benchmarks/harness.py --rounds 5 --json benchmarks/results/harness.json

`--check` measures no time: it counts what a busy machine does not change, and compares it with what
benchmarks/results/harness_counts.json has. `--cpu --json benchmarks/results/rank_cost.json` measures CPU time (counts.py).

The times of pytest-nsa, MultiProcessTestCase and MultiProcContinuousTest are those of each test but the first, which waits for
imports and ranks. Those of torchrun and spawn are whole, as every test pays them.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import counts
from figures import keep, parser_of

Way = Callable[[Path, int], list[float]]


def ours(step: str, *options: str) -> Way:
    """Return a way that measures tests on ranks, as pytest itself reports them."""

    def measure_tests(folder: Path, count: int) -> list[float]:
        report = folder / "report.xml"
        counts.run_tests(folder, step, count + 1, f"--junitxml={report}", *options)
        return [float(case.get("time", "nan")) for case in ElementTree.parse(report).iter("testcase")][1:]

    return measure_tests


def peer(script: str, way: str, *, skipped: int = 0) -> Way:
    """Return a way that a script measures, without the first ``skipped`` tests."""

    def run_script(folder: Path, count: int) -> list[float]:
        command = [sys.executable, str(counts.PEERS / script), way, str(count + skipped)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr)
        return json.loads(done.stdout.splitlines()[-1])[skipped:]

    return run_script


# Name, way, and its number of tests per round: few where they are expensive.
WAYS: tuple[tuple[str, Way, int], ...] = (
    ("floor", peer("trivial.py", "floor", skipped=1), 20),
    ("pytest-nsa", ours("pytest-nsa"), 20),
    ("pytest-nsa, ranks_ahead=false", ours("pytest-nsa", "-o", "ranks_ahead=false"), 20),
    ("pytest-nsa, reuse", ours("pytest-nsa, reuse"), 20),
    ("pytest-nsa, reuse, fresh group", ours("pytest-nsa, reuse, fresh group"), 20),
    ("MultiProcContinuousTest", peer("torch_test_cases.py", "MultiProcContinuousTest", skipped=1), 3),
    ("MultiProcessTestCase", peer("torch_test_cases.py", "MultiProcessTestCase", skipped=1), 1),
    ("torch.multiprocessing.spawn", peer("trivial.py", "spawn"), 2),
    ("torchrun in a subprocess", peer("trivial.py", "torchrun"), 1),
    ("forkserver pool (DeepSpeed's pattern)", peer("trivial.py", "pool"), 1),
)


def measure(rounds: int, only: str | None) -> tuple[dict[str, list[float]], dict[str, list[str]]]:
    """Return seconds per test by way, and what ended a way's turn early. All ways take their turn in each round."""
    times: dict[str, list[float]] = {}
    failed: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            for way, run, count in WAYS:
                if (way in failed and way not in times) or (
                    only and only not in way and way not in ("floor", "pytest-nsa")
                ):
                    continue
                try:
                    times.setdefault(way, []).extend(run(Path(folder), count))
                except RuntimeError as error:
                    failed.setdefault(way, []).append(str(error).strip().splitlines()[-1][:200])
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
