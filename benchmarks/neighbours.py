"""Runs ranked tests together with other plugins, one at a time, and compares the JUnit file with a run without it.

A row may have tests that use the plugin on ranks. The comment behind such a test's name is the outcome that it must have.

python benchmarks/neighbours.py --json benchmarks/results/neighbours.json [NAME...] writes what it found of the plugins that are
installed here; `--table` writes the table of docs/plugins.md from that file. `nox -s neighbours` installs them first.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "plugins.md"
RESULTS = ROOT / "benchmarks" / "results" / "neighbours.json"
KINDS = ("pass", "fail", "hang", "skip", "xfail")
PLAIN = ("test_plain_pass", "test_plain_fail")
PLAIN_TESTS = """
def test_plain_pass():
    pass


def test_plain_fail():
    assert 1 == 2
"""
TESTS = (
    """
import datetime
import threading
import time

import pytest
import torch
import torch.distributed as dist

from pytest_nsa import world_size


@world_size(2)
def test_ranked_pass(group):
    value = torch.ones(1)
    dist.all_reduce(value)
    assert value.item() == 2


@world_size(2)
def test_ranked_fail(group):
    assert group.rank == 0


@world_size(2)
@pytest.mark.timeout(60)
def test_ranked_hang(group):
    if group.rank == 0:
        dist.all_reduce(torch.ones(1))


@world_size(2)
def test_ranked_skip(group):
    pytest.skip("not here")


@world_size(2)
@pytest.mark.xfail(reason="known")
def test_ranked_xfail(group):
    assert group.rank == 0

"""
    + PLAIN_TESTS
)


@dataclass(frozen=True)
class Neighbour:
    """A plugin: its distribution, how it is switched on, and tests that use it on ranks."""

    distribution: str
    options: tuple[str, ...] = ()
    what: str = ""  # of its features, in words
    uses: str = ""  # tests, each with its outcome: ``def test_it(group):  # passed``
    files: Mapping[str, str] = field(default_factory=dict)  # that the tests need

    def expected(self) -> dict[str, str]:
        """Return the outcome that each test of ``uses`` must have."""
        return dict(re.findall(r"def (test_\w+)\(.*\):  # (.+)", self.uses))


CLOCKS = """
@world_size(2)
@pytest.mark.timeout(60)
def test_hang_under_a_stopped_clock(FIXTURES):  # failure: extra_collective, rank 0
    STOP
    if group.rank == 0:
        dist.all_reduce(torch.ones(1))


@world_size(2)
def test_clock_of_each_rank(FIXTURES):  # failure: assertion, rank 1
    STOP
    before = time.time()
    dist.barrier()
    assert datetime.date.today().year == 2020
    assert time.time() == before
    assert group.rank == 0
"""


def stop_clocks(fixtures: str, stop: str) -> str:
    """Return CLOCKS with a way to stop them."""
    return CLOCKS.replace("FIXTURES", fixtures).replace("STOP", stop)


MOCK = """
@world_size(2)
@pytest.mark.timeout(60)
def test_hang_under_a_mocked_clock(group, mocker):  # failure: extra_collective, rank 0
    for name in ("monotonic", "time", "perf_counter", "sleep"):
        mocker.patch(f"time.{name}", return_value=1.0)
    if group.rank == 0:
        dist.all_reduce(torch.ones(1))


@world_size(2)
def test_builtins(group, mocker):  # failure: assertion, rank 1
    mocker.patch("builtins.open", side_effect=OSError("no files"))
    mocker.patch("json.dumps", side_effect=ValueError)
    mocker.patch("os.getpid", return_value=42)
    mocker.patch("os.kill")
    mocker.patch("os.write", side_effect=OSError)
    dist.barrier()
    assert group.rank == 0


@world_size(2)
def test_a_collective(group, mocker):  # passed
    mocked = mocker.patch("torch.distributed.all_reduce")
    dist.all_reduce(torch.ones(1))
    mocked.assert_called_once()
"""
ASYNC = """
import asyncio, pytest_asyncio

@pytest_asyncio.fixture
async def queue(group):
    queue = asyncio.Queue()
    queue.put_nowait(group.rank)
    yield queue, asyncio.get_running_loop()

@world_size(2)
async def test_reduces(queue, group):  # passed
    numbers, loop = queue
    assert asyncio.get_running_loop() is loop
    value = torch.tensor([await numbers.get()])
    await asyncio.to_thread(dist.all_reduce(value, async_op=True).wait)
    assert value.item() == 1

class TestMethods:
    @world_size(2)
    async def test_coroutine_fails(self, group):  # failure: assertion, rank 1
        await asyncio.sleep(0)
        assert group.rank == 0
"""
DJANGO = {
    "settings_of_the_site.py": """
SECRET_KEY = "of a test"
INSTALLED_APPS = ["django.contrib.auth", "django.contrib.contenttypes"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "site.db", "TEST": {"NAME": "site_of_tests.db"}}}
"""
}
# Without options.
PLAIN_NAMES = """
pytest-benchmark pytest-bdd pytest-describe
pytest-randomly pytest-rerunfailures pytest-retry flaky pytest-dependency pytest-forked pytest-asyncio anyio
pytest-trio hypothesis syrupy inline-snapshot pytest-regressions pytest-check
pytest-github-actions-annotate-failures pytest-sugar pytest-pretty pytest-clarity pytest-icdiff pytest-repeat
pytest-order pytest-socket pytest-env pytest-dotenv pytest-run-parallel typeguard pytest-beartype pyfakefs
pytest-playwright nbval
"""
NEIGHBOURS = (
    *map(Neighbour, PLAIN_NAMES.split()),
    Neighbour("pytest-timeout", ("--timeout-method=thread",), "--timeout-method=thread"),
    Neighbour("pytest-xdist", ("-n", "2"), "-n 2"),
    Neighbour("pytest-xdist", ("-n", "2", "--dist", "worksteal"), "-n 2 --dist worksteal"),
    Neighbour("pytest-cov", ("--cov=.",), "--cov"),
    Neighbour("pytest-rerunfailures", ("--reruns", "1"), "--reruns 1"),
    Neighbour("pytest-forked", ("--forked",), "--forked"),
    Neighbour("pytest-asyncio", ("-o", "asyncio_mode=auto"), "auto mode", ASYNC),
    Neighbour("pytest-mock", what="mocked clocks and files", uses=MOCK),
    Neighbour(
        "freezegun",
        what="`freeze_time`",
        uses=stop_clocks("group", "import freezegun; freezegun.freeze_time('2020-01-01').start()"),
    ),
    Neighbour("pytest-freezer", what="`freezer`", uses=stop_clocks("group, freezer", "freezer.move_to('2020-01-01')")),
    Neighbour(
        "pytest-freezer",
        what="the mark",
        uses=stop_clocks("group", "pass").replace(
            "@world_size(2)", "@pytest.mark.freeze_time('2020-01-01')\n@world_size(2)"
        ),
    ),
    Neighbour(
        "time-machine",
        what="`time_machine`",
        uses=stop_clocks("group, time_machine", "time_machine.move_to('2020-01-01', tick=False)"),
    ),
    Neighbour("pytest-profiling", ("--profile",), "--profile"),
    Neighbour("pytest-testmon", ("-p", "cacheprovider", "--testmon"), "--testmon"),
    Neighbour("pytest-django", ("--ds=settings_of_the_site",), "--ds", files=DJANGO),
    Neighbour("pytest-mpl", ("--mpl",), "--mpl"),
    Neighbour("pytest-html", ("-p", "metadata", "--html=report.html"), "--html"),
    Neighbour("pytest-json-report", ("--json-report",), "--json-report"),
    Neighbour("pytest-md", ("--md", "report.md"), "--md"),
    Neighbour("pytest-reportlog", ("--report-log=log.jsonl",), "--report-log"),
    Neighbour("allure-pytest", ("--alluredir=allure",), "--alluredir"),
    Neighbour("pytest-rich", ("--rich",), "--rich"),
    Neighbour("pytest-instafail", ("--instafail",), "--instafail"),
    Neighbour("pytest-split", ("--splits", "1", "--group", "1"), "--splits"),
    Neighbour("pytest-memray", ("--memray",), "--memray"),
)


def entry_points(distribution: str) -> list[str]:
    """Return the names of a distribution's pytest plugins. PackageNotFoundError where it is not installed."""
    return sorted({e.name for e in metadata.distribution(distribution).entry_points if e.group == "pytest11"})


def run(
    neighbour: Neighbour | None, tests: str = TESTS, ours: str = "pytest_nsa.plugin"
) -> tuple[dict[str, str], float]:
    """Return the outcome of each test with a plugin, or without any, as the JUnit file has it; and the seconds."""
    names = [] if neighbour is None else entry_points(neighbour.distribution)
    others = [] if neighbour is None or neighbour.distribution == "pytest-timeout" else names
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [argument for name in ("pytest_timeout", ours, *others) if name for argument in ("-p", name)]
    with tempfile.TemporaryDirectory() as folder:
        if neighbour is not None:
            tests += neighbour.uses if ours else ""
            for name, text in neighbour.files.items():
                (Path(folder) / name).write_text(text)
        (Path(folder) / "test_neighbours.py").write_text(tests)
        began = time.monotonic()
        done = subprocess.run(
            [*command, *(() if neighbour is None else neighbour.options), "--junitxml=junit.xml", "--rootdir=."], cwd=folder,
            env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT))},
            text=True, capture_output=True, timeout=300, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        seconds = time.monotonic() - began
        report = Path(folder) / "junit.xml"
        if not report.is_file():
            return {"session": (done.stderr or done.stdout).strip().splitlines()[-1][:200]}, seconds
        return {
            case.get("name", "").partition("[")[0]: outcome(case) for case in ET.parse(report).iter("testcase")
        }, seconds


def outcome(case: ET.Element) -> str:
    """Return a test's outcome in JUnit's words, and of a ranked failure its cause and ranks."""
    for kind in ("failure", "error", "skipped"):
        found = case.find(kind)
        if found is not None:
            text = (found.get("message") or "").partition("\n")[0]
            cause = re.search(r"(\w+), (ranks? \d[\d, and-]*\b(?: of \d+)?)", text)
            return f"{kind}: {cause[1]}, {cause[2].strip()}" if cause and kind != "skipped" else kind
    return "passed"


def compared(neighbour: Neighbour, found: dict[str, str], without: dict[str, str]) -> dict[str, object]:
    """Return what each kind of ranked test gave, and the tests with another outcome than without the plugin, or in its row."""
    without = {**without, **neighbour.expected()}
    kinds = {kind: found.get(f"test_ranked_{kind}", "not run") for kind in KINDS}
    other = {name: found.get(name, "not run") for name in without if found.get(name) != without[name]}
    if any(name in other for name in PLAIN):  # or does the plugin do so by itself?
        alone = run(neighbour, PLAIN_TESTS, ours="")[0]
        other = {n: f"{o}, without pytest-nsa too" if alone.get(n) == o else o for n, o in other.items()}
    return {**kinds, "junit": "same" if not other and set(found) == set(without) else "differs", "differs": other}


def table(results: dict[str, object]) -> str:
    """Return the table of docs/plugins.md."""
    rows = ["| plugin | version | with | pass, fail, hang, skip, xfail | JUnit |", "| --- | --- | --- | --- | --- |"]
    for row in results["plugins"]:  # type: ignore[attr-defined]
        differs = "; ".join(f"{name.removeprefix('test_')}: {words}" for name, words in row["differs"].items())
        same = all(f"test_ranked_{kind}" not in row["differs"] for kind in KINDS)
        options = f"`{row['with']}`" if row["with"].startswith("-") else row["with"]
        ranked = "as without it" if same else "differ"
        rows.append(f"| {row['name']} | {row['version']} | {options} | {ranked} | {differs or row['junit']} |")
    return "\n".join(rows) + "\n"


def page_with(text: str, results: dict[str, object]) -> str:
    """Return docs/plugins.md with the table of the results in its place."""
    start, end = "<!-- matrix -->\n", "<!-- end of matrix -->"
    before, _, rest = text.partition(start)
    return before + start + table(results) + end + rest.partition(end)[2]


def main() -> int:
    """Run what is requested; returns 1 where a ranked test's outcome is another."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="distributions (default: all that are installed)")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--table", action="store_true", help="write the table of docs/plugins.md, and run nothing")
    arguments = parser.parse_args()
    if arguments.table:
        PAGE.write_text(page_with(PAGE.read_text(), json.loads(RESULTS.read_text())))
        return 0
    without, seconds = run(None)
    print("without another plugin", round(seconds, 1), without, flush=True)
    rows = []
    for neighbour in NEIGHBOURS:
        if arguments.names and neighbour.distribution not in arguments.names:
            continue
        try:
            version = metadata.version(neighbour.distribution)
        except metadata.PackageNotFoundError:
            print(neighbour.distribution, "is not installed", flush=True)
            continue
        found, seconds = run(neighbour)
        row = {
            "name": neighbour.distribution,
            "version": version,
            "with": neighbour.what,
            **compared(neighbour, found, without),
        }
        print(row, round(seconds, 1), flush=True)
        rows.append({**row, "seconds": round(seconds, 1)})
    versions = {name: metadata.version(name) for name in ("pytest", "pytest-timeout", "torch")}
    results = {
        "without": without, "plugins": rows, "versions": versions, "python": sys.version.split()[0],
        "date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(),
    }  # fmt: skip
    if arguments.json is not None:
        if arguments.names and arguments.json.is_file():  # the other plugins' rows stay, in the order of the list
            before = {(row["name"], row["with"]): row for row in json.loads(arguments.json.read_text())["plugins"]}
            before.update({(row["name"], row["with"]): row for row in rows})
            known = [before.get((n.distribution, n.what)) for n in NEIGHBOURS]
            results["plugins"] = [row for row in known if row is not None]
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return int(any(row["differs"].keys() - set(PLAIN) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
