"""Count what a passing two-rank test costs and a busy machine does not change: system calls, files, bytes, page faults, imports.

`python benchmarks/harness.py --check` compares the counts with benchmarks/results/harness_counts.json.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parent / "results" / "harness_counts.json"
MORE = 1.10  # times what the table has: then a row fails
FEW, MANY = 4, 20  # tests of the two runs of which the difference is counted: what a session costs once is in both
SUITE = """\
import sys

import pytest
import torch
import torch.distributed as dist
from pytest_nsa import reuse, world_size


{mark}class TestTrivial:
    @pytest.mark.parametrize("n", range({count}))
    @world_size(2)
    def test_it(self, group, n):
        if n == 0 and group.rank == 0:
            print(len(sys.modules), file=open("modules", "w"))
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == 2
"""
WAYS = {"fresh ranks": "", "reuse": "@reuse\n"}
# How often these are called depends on who is first.
WAITS = (
    "epoll_wait", "epoll_pwait", "futex", "poll", "ppoll", "select", "pselect6", "wait4", "waitid", "restart_syscall",
    "clock_nanosleep", "nanosleep", "sched_yield", "recvfrom", "recvmsg", "rt_sigreturn",
)  # fmt: skip
# What a process sends once for each test.
_KINDS = {"run": "the host", "started": "the zygote", "finished": "a rank"}
_MAKES = re.compile(r"openat\(.*O_CREAT.* = \d|mkdir(?:at)?\(.* = 0")
_REMOVES = re.compile(r"(?:unlink(?:at)?|rmdir)\(.* = 0")


def _run(folder: Path, mark: str, count: int, *tracer: str) -> None:
    (folder / "test_trivial.py").write_text(SUITE.format(mark=mark, count=count))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    subprocess.run(
        [*tracer, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "test_trivial.py"],
        cwd=folder, env=environment, check=True, capture_output=True,
    )  # fmt: skip


def _io() -> dict[str, int]:
    """Return what this process and the children that it has waited for have read and written, as /proc counts it."""
    return {n: int(v) for n, v in (line.split(":") for line in Path("/proc/self/io").read_text().splitlines())}


def _of_processes(folder: Path, mark: str, count: int) -> dict[str, float]:
    """Return the counts of a run over all of its processes, by the kernel's own counters."""
    faults, io = resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt, _io()
    _run(folder, mark, count)
    after = _io()
    run = (folder / "artifacts" / "latest").resolve()
    found = {
        "minor faults": resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt - faults,
        "calls of write": after["syscw"] - io["syscw"],
        "bytes written": after["wchar"] - io["wchar"],
        "bytes left in artifacts": sum(path.stat().st_size for path in run.rglob("*") if path.is_file()),
        "folders left in artifacts": sum(path.is_dir() for path in run.iterdir()),
    }
    shutil.rmtree(folder / "artifacts")
    return found


def _of_a_test(folder: Path, mark: str) -> dict[str, float]:
    few, many = _of_processes(folder, mark, FEW), _of_processes(folder, mark, MANY)
    return {name: (many[name] - few[name]) / (MANY - FEW) for name in many}


def _calls(folder: Path, mark: str, count: int) -> tuple[dict[str, list[int]], int, int]:
    """Return, by strace, the system calls of each test in each kind of process, and how many files all have made and removed."""
    traces = folder / "traces"
    traces.mkdir()
    _run(
        folder,
        mark,
        count,
        "strace",
        "-ff",
        "-qq",
        "-s",
        "60",
        "-e",
        f"trace=!{','.join(WAITS)}",
        "-o",
        str(traces / "of"),
    )
    found: dict[str, list[int]] = {kind: [] for kind in _KINDS.values()}
    made = removed = 0
    for path in traces.iterdir():
        lines = path.read_text(errors="replace").splitlines()
        made += sum(map(bool, map(_MAKES.match, lines)))
        removed += sum(map(bool, map(_REMOVES.match, lines)))
        sent = {
            op: [n for n, line in enumerate(lines) if line.startswith("sendto(") and f'\\"op\\": \\"{op}\\"' in line]
            for op in _KINDS
        }
        op = next((op for op in _KINDS if sent[op]), "")
        if op and len(sent[op]) > 1:
            found[_KINDS[op]] += [after - before for before, after in itertools.pairwise(sent[op])]
        elif op:  # a rank of one test
            found[_KINDS[op]].append(len(lines))
    shutil.rmtree(traces)
    shutil.rmtree(folder / "artifacts")
    return found, made, removed


def _of_calls(folder: Path, mark: str) -> dict[str, float]:
    """Return the counts of a test that strace shows. Of calls the lower quartile: in other tests a process has looked again."""
    _, made, removed = _calls(folder, mark, FEW)
    calls, more_made, more_removed = _calls(folder, mark, MANY)
    found: dict[str, float] = {
        f"system calls of {kind}": statistics.quantiles(each, method="inclusive")[0] for kind, each in calls.items()
    }
    return found | {
        "files opened to be written, and folders made": (more_made - made) / (MANY - FEW),
        "files and folders removed": (more_removed - removed) / (MANY - FEW),
    }


def count(*, with_strace: bool) -> dict[str, float]:
    """Return the counts by row: 'fresh ranks: minor faults'."""
    rows: dict[str, float] = {}
    for way, mark in WAYS.items():
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            found = _of_a_test(folder, mark)
            found["modules in the zygote"] = int((folder / "modules").read_text())
            if with_strace:
                found |= _of_calls(folder, mark)
        rows |= {f"{way}: {what}": round(number, 1) for what, number in found.items()}
    return rows


def has_strace() -> bool:
    """Return whether strace is installed and may follow a process."""
    command = ["strace", "-qq", "-o", os.devnull, "true"]
    return (
        shutil.which("strace") is not None and subprocess.run(command, capture_output=True, check=False).returncode == 0
    )


def same_versions(table: dict[str, Any]) -> bool:
    """Return whether a table is of this machine's versions: others have other modules, and pages."""
    here = versions()
    return all(table["versions"][name] == here[name] for name in here)


def versions() -> dict[str, str]:
    """Return what the counts depend on."""
    names = {name: metadata.version(name) for name in ("torch", "pytest")}
    return {"python": ".".join(platform.python_version_tuple()[:2]), **names}


def worse(rows: dict[str, float], table: dict[str, float]) -> list[str]:
    """Return a line for each row that has grown by more than a tenth, and by more than chance adds to it."""
    return [
        f"{name}: {rows[name]:g}, and {table[name]:g} in {TABLE.name}"
        for name in sorted(rows.keys() & table.keys())
        if rows[name] > max(MORE * table[name], table[name] + (100 if name.endswith("faults") else 1))
    ]


def check() -> int:
    """Count, print, compare; return the exit code: 1 where a row is worse in two counts, 2 where the table is of other versions."""
    table = json.loads(TABLE.read_text())
    if not same_versions(table):
        print(
            f"{TABLE.name} is of {table['versions']}, and this is {versions()}: count there, or write it anew with --count"
        )
        return 2
    rows = count(with_strace=has_strace())
    if worse(rows, table["rows"]):  # a process that a busy machine lets wait looks again
        again = count(with_strace=has_strace())
        rows = {name: min(number, again.get(name, number)) for name, number in rows.items()}
    for name, number in rows.items():
        print(f"{name}: {number:g} ({table['rows'].get(name, 'new')})")
    found = worse(rows, table["rows"])
    print("\n".join(found) or "nothing is worse")
    return int(bool(found))


def write() -> None:
    """Count, and write the table."""
    TABLE.write_text(json.dumps({"versions": versions(), "rows": count(with_strace=True)}, indent=1) + "\n")
