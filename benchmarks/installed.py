"""Other people's suites without ranks: does it change anything that the plugin is installed?

Each suite of SUITES, pinned, runs without the plugin and with it, in one environment and in folders of one name. Compared are the
exit code, the JUnit file, the files that are left, what tests see of their process (handlers of signals, hooks of the interpreter,
variables, children, threads), and whether ranks ran. What also differs between two runs without the plugin is counted by itself.

    python benchmarks/installed.py --work /tmp/installed --json benchmarks/results/installed.json [--only joblib]
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tarfile
import time
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from figures import parser_of

HERE = Path(__file__).resolve().parent
PINS = ("pytest==9.2.0", "pytest-timeout==2.4.0", "torch==2.14.1", "numpy==2.4.6")
LIMIT_S = 900.0


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A package with its version, and which of its tests run: modules of the package, or files of its source distribution."""

    package: str
    tests: tuple[str, ...]
    needs: tuple[str, ...] = ()  # () for what the package itself names
    has_source: bool = True
    folder: str = ""  # in the package, which its tests need and no wheel has
    options: tuple[str, ...] = ()


SUITES = (
    Suite(
        package="matplotlib==3.11.2", has_source=False, folder="matplotlib/tests/baseline_images",  # has marks `backend`
        tests=tuple(f"matplotlib.tests.test_{name}" for name in (
            "backend_bases", "backend_pdf", "backend_svg", "backend_ps", "rcparams", "pyplot", "cbook", "ticker", "text",
        )),
    ),
    Suite(
        package="scikit-learn==1.9.1", has_source=False,
        tests=("sklearn.utils.tests.test_parallel", "sklearn.utils.tests.test_validation", "sklearn.metrics.tests.test_ranking"),
    ),
    Suite(
        package="xarray==2026.9.0", has_source=False, needs=("pandas", "pytz"),
        tests=tuple(f"xarray.tests.test_{name}" for name in ("variable", "concat", "indexing", "coding_times", "utils")),
    ),
    Suite(package="networkx==3.6.1", tests=("networkx.classes", "networkx.algorithms.shortest_paths"), has_source=False),
    Suite(package="joblib==1.6.0", tests=("joblib.test",), has_source=False),
    Suite(
        package="pytest-django==4.14.0", tests=("tests",), needs=("django",),
        options=("--ds", "pytest_django_test.settings_sqlite"),
    ),
    Suite(package="pytest-mpl==0.19.0", tests=("tests/test_pytest_mpl.py",), needs=("matplotlib", "Jinja2")),
    Suite(package="pytorch-ignite==0.5.5", tests=("tests/ignite/engine/test_engine.py", "tests/ignite/distributed/test_auto.py")),
    Suite(
        package="accelerate==1.15.0", needs=("parameterized", "transformers", "psutil"),
        tests=tuple(f"tests/test_{name}.py" for name in ("data_loader", "utils", "cpu", "hooks", "optimizer", "scheduler")),
    ),
    Suite(
        package="mosaicml-streaming==0.13.0", options=("-o", "addopts="),
        needs=("transformers", "catalogue", "torchvision==0.29.1", "xxhash", "Brotli", "zstd", "python-snappy", "boto3", "tqdm"),
        tests=("tests/test_partition.py", "tests/test_array.py", "tests/test_encodings.py", "tests/test_sampling.py"),
    ),  # has marks `world_size`
)  # fmt: skip


class Suites:
    """An environment, and in it each suite's runs."""

    def __init__(self, work: Path) -> None:
        self.work, self.python = work, work / "venv" / "bin" / "python"
        self.plugin, self.none = work / "plugin", work / "none"
        self.none.mkdir(parents=True, exist_ok=True)
        if not self.python.is_file():
            venv.create(work / "venv", with_pip=True)
            self._pip("install", *PINS)
        shutil.rmtree(self.plugin, ignore_errors=True)
        self._pip("install", "--no-deps", "--target", str(self.plugin), str(HERE.parent))

    def _pip(self, *words: str) -> None:
        subprocess.run([self.python, "-m", "pip", words[0], "-q", *words[1:]], check=True)

    def _sources(self, suite: Suite) -> Path | None:
        """Install a suite's package; return the folder of its source distribution, if its tests are there."""
        name = suite.package.partition("==")[0]
        folder = self.work / "sources" / name
        if not folder.is_dir():
            folder.mkdir(parents=True)
            self._pip("install", *(suite.needs or (suite.package,)), *PINS[2:])
            self._pip("install", "--no-deps", suite.package)
            if suite.folder:
                next(self.work.glob("venv/lib/*/site-packages")).joinpath(suite.folder).mkdir(exist_ok=True)
            if suite.has_source:
                words = ("--no-deps", "--no-binary", name, "-d", str(folder), suite.package)
                self._pip("download", *words)
                with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
                    archive.extractall(folder, filter="data")
        return next(path for path in folder.iterdir() if path.is_dir()) if suite.has_source else None

    def run(self, suite: Suite, *, has_plugin: bool) -> dict[str, Any]:
        """Run a suite in a fresh folder; return what is compared, and the seconds."""
        source, folder, temporary = self._sources(suite), self.work / "run", self.work / "tmp"
        for path in (folder, temporary):
            shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(source, folder) if source is not None else folder.mkdir()
        temporary.mkdir()
        seen, junit = self.work / "seen.json", self.work / "junit.xml"
        for path in (seen, junit):
            path.unlink(missing_ok=True)
        variables = {
            "PYTHONPATH": os.pathsep.join(map(str, (self.plugin if has_plugin else self.none, HERE / "clients", folder))),
            "TMPDIR": str(temporary), "SEEN": str(seen), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0",
            "TORCHINDUCTOR_CACHE_DIR": str(self.work / "inductor"),
        }  # fmt: skip
        words = (
            "-p",
            "seen_by_tests",
            "-p",
            "no:cacheprovider",
            f"--junitxml={junit}",
            "-q",
            "--color=no",
            "-rN",
            "--tb=line",
        )
        tests = suite.tests if suite.has_source else ("--pyargs", *suite.tests)
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        done = subprocess.run(
            [self.python, "-m", "pytest", *words, *suite.options, *tests], cwd=folder, env={**os.environ, **variables},
            text=True, capture_output=True, check=False, timeout=LIMIT_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        seconds, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        (self.work / f"{suite.package}-{'with' if has_plugin else 'without'}.log").write_text(done.stdout + done.stderr)
        return {
            "exit": done.returncode, "junit": dict(_cases(junit)), "files": dict.fromkeys(_files(folder, temporary)),
            "seen": json.loads(seen.read_text()) if seen.is_file() else {}, "seconds": round(seconds, 1),
            "cpu_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        }  # fmt: skip


def _cases(junit: Path) -> Iterator[tuple[str, str]]:
    """Yield each test's id and outcome, with the message."""
    for case in ElementTree.parse(junit).iter("testcase") if junit.is_file() else ():
        found = [(part.tag, _plain(part.get("message") or "")) for part in case if part.tag != "system-out"]
        yield f"{case.get('classname')}::{case.get('name')}", str(found)


def _plain(text: str) -> str:
    """Return a text without addresses, ids, times and names of temporary folders."""
    return re.sub(r"\btmp\w{8}\b|\w*\d\w*", "N", text)


def _files(*folders: Path) -> Iterator[str]:
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if "__pycache__" not in path.parts:
                yield _plain(str(path.relative_to(folder.parent)))


def differences(one: dict[str, Any], other: dict[str, Any]) -> dict[str, dict[str, list[Any]]]:
    """Return by subject what two runs differ in."""
    found = {}
    for subject in ("junit", "files", "seen"):
        a, b = one[subject], other[subject]
        found[subject] = {k: [a.get(k, "-"), b.get(k, "-")] for k in {**a, **b} if a.get(k, "-") != b.get(k, "-")}
    found["exit"] = {} if one["exit"] == other["exit"] else {"": [one["exit"], other["exit"]]}
    return {subject: differ for subject, differ in found.items() if differ}


def compare(suites: Suites, suite: Suite) -> dict[str, Any]:
    """Return a suite's row."""
    without, having = suites.run(suite, has_plugin=False), suites.run(suite, has_plugin=True)
    differ, by_itself = differences(without, having), {}
    if differ:
        by_itself = differences(without, suites.run(suite, has_plugin=False))
        differ = {
            subject: left for subject, entries in differ.items()
            if (left := {k: v for k, v in entries.items() if k not in by_itself.get(subject, {})})
        }  # fmt: skip
    outcomes = [next(iter(re.findall(r"^\[\('(\w+)'", found)), "passed") for found in having["junit"].values()]
    return {
        "pins": PINS, "date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(), "tests": list(suite.tests),
        "number": len(outcomes), "exit": having["exit"],
        "outcomes": {kind: outcomes.count(kind) for kind in sorted(set(outcomes))}, "differs": differ,
        "differs_without_it": {subject: len(entries) for subject, entries in by_itself.items()},
        "ranks": sum("/verdicts.jsonl" in name for name in having["files"]),
        "seconds": [without["seconds"], having["seconds"]], "cpu_seconds": [without["cpu_seconds"], having["cpu_seconds"]],
    }  # fmt: skip


def main() -> int:
    """Run what is requested; returns 1 where a suite differs."""
    parser = parser_of(__doc__)
    parser.add_argument("--work", type=Path, required=True, help="the folder of the environment and sources")
    parser.add_argument("--only", default="", help="packages, comma-separated (default: all)")
    options = parser.parse_args()
    suites, rows = Suites(options.work.resolve()), {}
    for suite in SUITES:
        if not options.only or suite.package.partition("==")[0] in options.only.split(","):
            row = rows[suite.package] = compare(suites, suite)
            print(suite.package, json.dumps({k: v for k, v in row.items() if k != "pins"}), flush=True)
            if options.json is not None:
                kept = json.loads(options.json.read_text()) if options.json.is_file() else {}
                options.json.write_text(json.dumps({**kept, suite.package: row}, indent=1) + "\n")
    return int(any(row["differs"] or row["ranks"] for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
