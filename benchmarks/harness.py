"""What a trivial two-rank gloo test costs with pytest-nsa, beside the bare floor, interleaved in one run.

A test = start two ranks, form the group, one all_reduce, assert, report. The floor = fork two children of a process that has
torch, FileStore, gloo, all_reduce, exit. Prints both and their ratio; ``--json FILE`` keeps them.

    python benchmarks/harness.py --rounds 20
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

TEST = """\
import torch
import torch.distributed as dist
from pytest_nsa import world_size
import pytest

@pytest.mark.parametrize("n", range({count}))
@world_size(2)
def test_trivial(group, n):
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2
"""


def floor_once(folder: str) -> float:
    """Seconds for two forked children to form a gloo group, reduce once and exit."""
    started = time.perf_counter()
    store = os.path.join(folder, f"store{time.monotonic_ns()}")
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


def ours_once(folder: Path, count: int) -> list[float]:
    """Seconds of each trivial test but the first (which waits for the zygote's imports), as pytest itself reports them."""
    (folder / "test_trivial.py").write_text(TEST.format(count=count))
    report = folder / "report.xml"
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", "test_trivial.py"],
        cwd=folder, check=True, capture_output=True,
    )  # fmt: skip
    from xml.etree import ElementTree

    return [float(case.get("time", "nan")) for case in ElementTree.parse(report).iter("testcase")][1:]


def main() -> None:
    """Measure, print, and keep what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="how often floor and ours take turns (default: 5)")
    parser.add_argument("--tests", type=int, default=11, help="tests in each turn of ours (default: 11)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    floor: list[float] = []
    ours: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        floor_once(folder)
        for _ in range(arguments.rounds):
            floor += [floor_once(folder) for _ in range(arguments.tests - 1)]
            ours += ours_once(Path(folder), arguments.tests)
    figures = {
        "floor_ms": {
            "median": 1e3 * statistics.median(floor),
            "min": 1e3 * min(floor),
            "max": 1e3 * max(floor),
            "n": len(floor),
        },
        "ours_ms": {
            "median": 1e3 * statistics.median(ours),
            "min": 1e3 * min(ours),
            "max": 1e3 * max(ours),
            "n": len(ours),
        },
        "ratio_of_medians": statistics.median(ours) / statistics.median(floor),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "date": time.strftime("%Y-%m-%d"),
    }
    for name in ("floor_ms", "ours_ms"):
        f = figures[name]
        print(f"{name:>9}: median {f['median']:6.1f}  min {f['min']:6.1f}  max {f['max']:6.1f}  (n={f['n']})")
    print(f"ratio of medians: {figures['ratio_of_medians']:.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
