"""Endurance: thousands of two-rank tests in one session, every tenth with a fault; then hundreds under -n 4, several times over.

It counts good tests that fail and faults that are not reported, and measures whether descriptors, memory and processes of the
host stay flat. It prints the figures; ``--json FILE`` keeps them.

    python benchmarks/soak.py --tests 2000 --json benchmarks/results/soak.json
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from xml.etree import ElementTree

from figures import keep, parser_of

TESTS = """\
import os, signal, subprocess, sys
import pytest, torch
import torch.distributed as dist
from pytest_nsa import world_size

FAULTS = ("assertion", "exception", "sigkill", "exit", "skipped", "child")

@pytest.mark.parametrize("n", range({count}))
@world_size(2)
def test_it(group, n):
    fault = FAULTS[n // 10 % len(FAULTS)] if n % 10 == 9 else ""
    if fault and group.rank == n // 10 % 2:
        if fault == "assertion": assert n < 0
        if fault == "exception": raise ValueError(n)
        if fault == "sigkill": os.kill(os.getpid(), signal.SIGKILL)
        if fault == "exit": os._exit(3)
        if fault == "skipped": return
        if fault == "child": subprocess.Popen(["sleep", "1000"])
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2
"""
WATCH = """\
import json, os
from pathlib import Path

def pytest_runtest_logfinish(nodeid):
    if "PYTEST_XDIST_WORKER" in os.environ or "RANK" in os.environ:
        return
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    tasks = Path("/proc/self/task").iterdir()
    children = sum(len((task / "children").read_text().split()) for task in tasks)
    rss = int(status["VmRSS"].split()[0]) / 1024
    seen = {"descriptors": len(os.listdir("/proc/self/fd")), "rss_mib": rss, "children": children}
    with open("seen.jsonl", "a") as file:
        file.write(json.dumps(seen) + "\\n")
"""


def run(folder: Path, count: int, *arguments: str) -> dict[str, int]:
    """Run a session over ``count`` tests; return the outcomes by kind."""
    (folder / "test_soak.py").write_text(TESTS.format(count=count))
    (folder / "conftest.py").write_text(WATCH)
    report = folder / "report.xml"
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "--tb=no", f"--junitxml={report}",
         *arguments],
        cwd=folder, check=False, capture_output=True,
    )  # fmt: skip
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = {c.get("name") for c in cases if c.find("failure") is not None or c.find("error") is not None}
    # The last one only leaves a child.
    faulty = {f"test_it[{n}]" for n in range(count) if n % 10 == 9 and n // 10 % 6 != 5}
    return {"tests": len(cases), "good_that_failed": len(failed - faulty), "faults_not_told": len(faulty - failed)}


def flatness(folder: Path) -> dict[str, list[float]]:
    """Return the medians of the host's figures over the second and the last tenth of the session."""
    seen = [json.loads(line) for line in (folder / "seen.jsonl").read_text().splitlines()]
    tenth = max(1, len(seen) // 10)
    return {
        name: [statistics.median(entry[name] for entry in part) for part in (seen[tenth : 2 * tenth], seen[-tenth:])]
        for name in ("descriptors", "rss_mib", "children")
    }


def left_behind() -> list[str]:
    """Return the names of the plugin's files in the folders for temporary files."""
    return sorted(p.name for folder in ("/tmp", "/dev/shm") for p in Path(folder).glob("pytest-nsa*"))


def main() -> None:
    """Run, print, keep."""
    parser = parser_of(__doc__)
    parser.add_argument("--tests", type=int, default=2000, help="two-rank tests in a row (default: 2000)")
    parser.add_argument("--workers", type=int, default=4, help="xdist workers for the second part (default: 4)")
    parser.add_argument("--times", type=int, default=3, help="how often the second part runs (default: 3)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        started = time.perf_counter()
        figures: dict[str, object] = {"in_a_row": run(folder, arguments.tests)}
        figures["seconds"] = round(time.perf_counter() - started, 1)
        figures["first_and_last_tenth"] = flatness(folder)
        figures[f"under_n{arguments.workers}"] = [
            run(folder, 200, f"-n{arguments.workers}") for _ in range(arguments.times)
        ]
    figures["left_behind"] = left_behind()
    keep(figures, arguments.json)


if __name__ == "__main__":
    main()
