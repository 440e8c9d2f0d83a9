"""Count what a passing two-rank test costs: CPU time, and what a busy machine does not change (system calls, files, page faults).

`python benchmarks/harness.py --check` compares the counts with benchmarks/results/harness_counts.json; `--cpu` measures CPU time,
from the bare floor to pytest-nsa:

- floor: two forks of a process that has torch, a gloo group over a FileStore, one all_reduce, exit;
- collected: the process that forks is a pytest that has collected the tests, as the zygote is;
- protocol: each child runs its test by `pytest_runtest_protocol`, with the fixtures and plugins that this takes;
- plain: a test without ranks, as the host of a ranked test runs it, too;
- pytest-nsa: all of that, and evidence is kept and read;
- pytest-nsa, reuse: the same with ranks that stay.

A figure is that of all processes of a run of many tests less that of a few: what a session costs once is in both.
"""

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
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

PEERS = Path(__file__).parent / "peers"
TABLE = Path(__file__).parent / "results" / "harness_counts.json"
MORE = 1.10  # times what the table has: then a row fails
FEW, MANY = 4, 20  # tests of the two runs; their difference is counted
TESTS = {
    "plain": 1004,
    "pytest-nsa, reuse": 304,
}  # for CPU time, of what is quick: the start of a session varies by half a second
WAYS = {"fresh ranks": "pytest-nsa", "reuse": "pytest-nsa, reuse"}
STEPS = ("floor", "collected", "protocol", "plain", *WAYS.values())
TEST = """\
import os
import sys

import pytest
import torch
import torch.distributed as dist
{imports}

{mark}class TestTrivial:
    @pytest.mark.parametrize("n", range({count}))
    {ranked}def test_it(self, group, n):
        if group is None:  # a test without ranks
            return
        if n == 0 and os.environ["RANK"] == "0":
            print(len(sys.modules), file=open("modules", "w"))
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == 2
"""
# A plugin of a few lines: what runs tests on forked ranks by pytest's own protocol cannot do less.
BARE = """\
import functools
import gc
import os

import pytest
import torch
import torch.distributed as dist
from trivial import floor, fork_two, join

STEP, STORE = os.environ["STEP"], os.environ["STORE"]
failed = 0


@pytest.fixture
def group(n):
    if STEP == "plain":
        return None
    join(int(os.environ["RANK"]), STORE + str(n))
    return dist.group.WORLD


def by_protocol(item, rank):
    os.environ["RANK"] = str(rank)
    item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
    return not failed


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
        floor(STORE + str(number)) if STEP == "collected" else fork_two(functools.partial(by_protocol, item))
    return True
"""
# How often these are called depends on who is first.
WAITS = (
    "epoll_wait", "epoll_pwait", "futex", "poll", "ppoll", "select", "pselect6", "wait4", "waitid", "restart_syscall",
    "clock_nanosleep", "nanosleep", "sched_yield", "recvfrom", "recvmsg", "rt_sigreturn",
)  # fmt: skip
# What a process sends once for each test.
_KINDS = {"run": "the host", "started": "the zygote", "finished": "a rank"}
_MAKES = re.compile(r"openat\(.*O_CREAT.* = \d|mkdir(?:at)?\(.* = 0")
_REMOVES = re.compile(r"(?:unlink(?:at)?|rmdir)\(.* = 0")


def run_tests(folder: Path, step: str, count: int, *options: str, tracer: Sequence[str] = ()) -> None:
    """Run ``count`` tests. Raises RuntimeError with the output where that fails."""
    is_ours, reuse = step.startswith("pytest-nsa"), "reuse" in step
    mark = "@reuse(group='fresh')\n" if step.endswith("fresh group") else "@reuse\n" if reuse else ""
    imports, ranked = ("from pytest_nsa import reuse, world_size\n", "@world_size(2)\n    ") if is_ours else ("", "")
    (folder / "test_trivial.py").write_text(TEST.format(count=count, imports=imports, mark=mark, ranked=ranked))
    plain = ("-q", "-p", "no:cacheprovider", "-p", "no:randomly", "test_trivial.py")
    command = [*tracer, sys.executable, "-m", "pytest", *plain, *options]
    if step == "floor":
        command = [sys.executable, str(PEERS / "trivial.py"), "floor", str(count)]
    elif not is_ours:
        (folder / "conftest.py").write_text(BARE)
        command += ["-p", "no:nsa", "-o", f"pythonpath={PEERS}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "STEP": step}
    with tempfile.TemporaryDirectory() as store:
        environment["STORE"] = f"{store}/store"
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 5):  # 5: pytest itself has run no test
        raise RuntimeError(f"{step}:\n{done.stdout}{done.stderr}")


def _io() -> dict[str, int]:
    """Return what this process and the children that it has waited for have read and written, as /proc counts it."""
    return {n: int(v) for n, v in (line.split(":") for line in Path("/proc/self/io").read_text().splitlines())}


def _of_processes(folder: Path, step: str, count: int) -> dict[str, float]:
    """Return the counts of a run over all of its processes, by the kernel's own counters."""
    before, io = resource.getrusage(resource.RUSAGE_CHILDREN), _io()
    run_tests(folder, step, count)
    after, more = resource.getrusage(resource.RUSAGE_CHILDREN), _io()
    system = 1e3 * (after.ru_stime - before.ru_stime)
    found = {
        "cpu_ms": system + 1e3 * (after.ru_utime - before.ru_utime),
        "system_ms": system,
        "minor faults": after.ru_minflt - before.ru_minflt,
        "calls of write": more["syscw"] - io["syscw"],
        "bytes written": more["wchar"] - io["wchar"],
    }
    if step in WAYS.values():
        run = (folder / "artifacts" / "latest").resolve()
        found["bytes left in artifacts"] = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
        found["folders left in artifacts"] = sum(path.is_dir() for path in run.iterdir())
        shutil.rmtree(folder / "artifacts")
    return found


def _of_a_test(folder: Path, step: str, most: int = MANY) -> dict[str, float]:
    few, many = _of_processes(folder, step, FEW), _of_processes(folder, step, most)
    return {name: (many[name] - few[name]) / (most - FEW) for name in many}


def cpu_times(rounds: int) -> dict[str, dict[str, float]]:
    """Return the medians of each step: milliseconds of CPU time, of it in the kernel, and minor faults, for a test."""
    found: dict[str, list[dict[str, float]]] = {step: [] for step in STEPS}
    for number in range(rounds):
        for step in STEPS:
            with tempfile.TemporaryDirectory() as folder:
                found[step].append(_of_a_test(Path(folder), step, TESTS.get(step, 104)))
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    names = ("cpu_ms", "system_ms", "minor faults")
    return {
        step: {name.replace(" ", "_"): round(statistics.median(row[name] for row in rows), 1) for name in names}
        for step, rows in found.items()
    }


def _calls(folder: Path, step: str, count: int) -> tuple[dict[str, list[int]], int, int]:
    """Return, by strace, the system calls of each test in each kind of process, and how many files all have made and removed."""
    traces = folder / "traces"
    traces.mkdir()
    options = ("-ff", "-qq", "-s", "60", "-e", f"trace=!{','.join(WAITS)}", "-o", str(traces / "of"))
    run_tests(folder, step, count, tracer=("strace", *options))
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


def _of_calls(folder: Path, step: str) -> dict[str, float]:
    """Return the counts of a test that strace shows. Of calls the lower quartile: in other tests a process has looked again."""
    _, made, removed = _calls(folder, step, FEW)
    calls, more_made, more_removed = _calls(folder, step, MANY)
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
    for way, step in WAYS.items():
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            found = _of_a_test(folder, step)
            del found["cpu_ms"], found["system_ms"]
            found["modules in the zygote"] = int((folder / "modules").read_text())
            if with_strace:
                found |= _of_calls(folder, step)
        rows |= {f"{way}: {what}": round(number, 1) for what, number in found.items()}
    return rows


def has_strace() -> bool:
    """Return whether strace is installed and may follow a process."""
    command = ["strace", "-qq", "-o", os.devnull, "true"]
    return (
        shutil.which("strace") is not None and subprocess.run(command, capture_output=True, check=False).returncode == 0
    )


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
    if table["versions"] != versions():  # others have other modules, and pages
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
    TABLE.write_text(json.dumps({"versions": versions(), "rows": count(with_strace=True)}, indent=1) + "\n")
