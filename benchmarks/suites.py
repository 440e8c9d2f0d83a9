"""Other people's suites: does it change anything that the plugin is installed, and do tests give the same outcomes on ranks?

Each suite of SUITES, pinned, runs without the plugin and with it, in one environment and in folders of one name. Compared are the
exit code, the JUnit file, the files that are left, what tests see of their process (handlers of signals, hooks of the interpreter,
variables, children, threads), and whether ranks ran. What also differs between two runs without the plugin is counted by itself.
Each suite of ON_RANKS runs in its usual way and on ranks; compared is each outcome.

    python benchmarks/suites.py --work /tmp/suites --json benchmarks/results/suites.json [--only joblib]
    python benchmarks/suites.py --work /tmp/suites --only deepspeed --source deepspeed=/src/DeepSpeed

git clones a tag of torchsnapshot, mmengine and DeepSpeed, as no package has their tests. DeepSpeed's compile two operators first,
which needs g++ and ninja; one of them leaves 66 MiB in /dev/shm for each rank of a test, which needs 4 GB.
"""

import glob
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from figures import parser_of

HERE = Path(__file__).resolve().parent
CLIENTS = HERE / "clients"
PINS = ("pytest==9.2.0", "pytest-timeout==2.4.0", "torch==2.14.1", "numpy==2.4.6")
LIMIT_S = 2400.0
BATCH = 20  # tests of a suite that leaves files
WORDS = ("-p", "no:cacheprovider", "-q", "--color=no", "-rN", "--tb=line")


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A package with its version, and which of its tests run: modules of the package, or files of its source distribution."""

    package: str
    tests: tuple[str, ...]
    needs: tuple[str, ...] = ()  # () for what the package itself names
    has_source: bool = True
    address: str = ""  # of its repository, which has the tests; the version is its tag
    folder: str = ""  # in the package, which its tests need and no wheel has; of a repository, where pytest runs
    options: tuple[str, ...] = ()
    plugin: str = ""  # adapters, or a module of benchmarks/clients: they run the tests on ranks
    usual: tuple[str, ...] = ()  # options of its usual way
    variables: dict[str, str] = field(default_factory=dict)
    prepare: str = "pass"  # a program that runs once
    leaves: str = ""  # files that its tests leave behind, as glob takes them

    @property
    def name(self) -> str:
        return self.package.partition("==")[0]


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
ON_RANKS = (
    Suite(
        package="torch==2.14.1", needs=("expecttest",), plugin="only_on_ranks", tests=("torch_suite.py",),
        variables={"BACKEND": "gloo", "WORLD_SIZE": "3"},
    ),
    Suite(
        package="pytorch-ignite==0.5.3", needs=("pytest-xdist", "mock", "filelock", "scikit-learn"), plugin="ignite_on_ranks",
        usual=("--dist=each", "--tx", "2*popen"), variables={"WORLD_SIZE": "2"},  # some tests are skipped by it
        tests=tuple(f"tests/ignite/{name}.py" for name in (
            "distributed/utils/test_native", "distributed/test_auto", "engine/test_deterministic", "metrics/test_accuracy",
            "metrics/test_loss", "metrics/test_metric", "metrics/test_epoch_metric",
        )),
    ),
    Suite(
        package="torcheval==0.0.6", address="https://github.com/pytorch/torcheval",
        plugin="pytest_nsa.adapters.elastic pytest_nsa.adapters.spawn",
        needs=("torchtnt==0.2.4", "setuptools==80.9.0", "scikit-learn", "typing_extensions"),
        tests=("tests/metrics/test_toolkit.py", "tests/metrics/aggregation", "tests/metrics/text"),
    ),
    Suite(
        package="ai2-olmo-core==v2.5.0", address="https://github.com/allenai/OLMo-core", plugin="pytest_nsa.adapters.spawn",
        needs=("ai2-olmo-core==2.5.0", "boto3", "google-cloud-storage"), folder="src",
        options=("-k", "not s3 and not gcs and not remote and not cloud", "-p", "no:cacheprovider"),
        tests=tuple(f"test/{name}" for name in (
            "distributed/checkpoint_test.py", "distributed/checkpoint/filesystem_test.py", "distributed/utils_test.py",
            "distributed/parallel", "distributed/nn_test.py", "train/checkpoint_test.py", "train/utils_test.py",
        )),
    ),
    Suite(
        package="monai==1.5.0", address="https://github.com/Project-MONAI/MONAI", plugin="pytest_nsa.adapters.monai",
        needs=("parameterized", "nibabel", "pytorch-ignite", "scipy"),
        tests=tuple(f"tests/{name}_dist.py" for name in (
            "metrics/test_cumulative_average", "handlers/test_handler_classification_saver",
            "handlers/test_handler_regression_metrics", "handlers/test_handler_metrics_saver",
            "handlers/test_handler_confusion_matrix", "handlers/test_handler_rocauc", "engines/test_prepare_batch_default",
            "data/test_weighted_random_sampler", "data/test_sampler", "utils/test_evenly_divisible_all_gather",
        )),
    ),
    Suite(
        package="mosaicml-streaming==v0.13.0", address="https://github.com/mosaicml/streaming",
        plugin="pytest_nsa.adapters.streaming", options=("-o", "addopts="),
        needs=("torchvision==0.29.1", "xxhash", "Brotli", "zstd", "python-snappy", "boto3", "tqdm", "moto", "google-cloud-storage"),
        tests=("tests/test_distributed.py", "tests/test_stream.py"),
    ),
    Suite(
        package="torchsnapshot==0.1.0", address="https://github.com/pytorch/torchsnapshot", plugin="pytest_nsa.adapters.elastic",
        needs=("aiofiles", "aiohttp", "importlib-metadata", "nest_asyncio", "psutil", "PyYAML", "pytest-asyncio"),
        tests=tuple(f"tests/test_{name}.py" for name in (
            "replication_glob", "sharded_tensor_io_preparer", "partitioner", "ddp", "ddp_replication_glob",
        )),
    ),
    Suite(
        package="mmengine==v0.10.7", address="https://github.com/open-mmlab/mmengine",
        plugin="pytest_nsa.adapters.multiprocess_test_case",
        needs=(
            "addict", "lmdb", "matplotlib", "opencv-python-headless", "parameterized", "PyYAML", "rich", "termcolor", "yapf",
        ),
        tests=tuple(f"tests/test_{name}.py" for name in (
            "dist/test_dist", "dist/test_utils", "model/test_wrappers/test_model_wrapper", "optim/test_optimizer/test_optimizer",
            "optim/test_optimizer/test_optimizer_wrapper", "hooks/test_sync_buffers_hook",
        )),
    ),
    Suite(
        package="deepspeed==v0.19.5", address="https://github.com/deepspeedai/DeepSpeed", plugin="pytest_nsa.adapters.deepspeed",
        folder="tests",
        needs=(
            "einops", "hjson", "msgpack", "ninja", "packaging", "psutil", "py-cpuinfo", "pydantic", "setuptools", "tqdm",
        ),
        tests=tuple(f"unit/{name}.py" for name in (
            "comm/test_dist", "runtime/pipe/test_topology", "runtime/utils/test_partition", "runtime/test_runtime_utils",
            "checkpoint/test_tag_validation",
        )),
        variables={"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "4"},  # the devices that DeepSpeed takes a CPU for
        leaves="/dev/shm/deepspeed_allreduce_buffer_*",
        prepare="""
from deepspeed.accelerator import get_accelerator
for name in ("ShareMemCommBuilder", "FusedAdamBuilder"):
    get_accelerator().create_op_builder(name).load()
""",
    ),
)  # fmt: skip


class Suites:
    """An environment, and in it each suite's runs. ``sources``: repositories in place of a suite's address."""

    def __init__(self, work: Path, sources: dict[str, str]) -> None:
        self.work, self.python, self.sources = work, work / "venv" / "bin" / "python", sources
        self.plugin, self.folder, self.temporary = work / "plugin", work / "run", work / "tmp"
        work.mkdir(parents=True, exist_ok=True)
        if not self.python.is_file():
            venv.create(work / "venv", with_pip=True)
            self._pip("install", *PINS)
        shutil.rmtree(self.plugin, ignore_errors=True)
        self._pip("install", "--no-deps", "--target", str(self.plugin), str(HERE.parent))

    def _pip(self, *words: str) -> None:
        subprocess.run([self.python, "-m", "pip", words[0], "-q", *words[1:]], check=True)

    def _source(self, suite: Suite) -> Path | None:
        """Install what a suite needs; return the folder with its tests, if no package has them."""
        if suite.name == "torch":  # whose tests are in its package, to be subclassed
            self._pip("install", *suite.needs)
            return CLIENTS
        folder = self.work / "sources" / suite.package
        if not folder.is_dir():
            folder.mkdir(parents=True)
            self._pip("install", *(suite.needs or (suite.package,)), *PINS[2:])
            if suite.address:
                tag, address = suite.package.partition("==")[2], self.sources.get(suite.name, suite.address)
                words = ("clone", "-q", "--depth", "1", "--branch", tag, address, str(folder / suite.name))
                subprocess.run(["git", *words], check=True)
                command, variables = [self.python, "-c", suite.prepare], self._variables(suite, folder / suite.name)
                subprocess.run(command, check=True, env={**os.environ, **variables})
            else:
                self._pip("install", "--no-deps", suite.package)
            if suite.folder and not suite.address:
                next(self.work.glob("venv/lib/*/site-packages")).joinpath(suite.folder).mkdir(exist_ok=True)
            if suite.has_source and not suite.address:
                words = ("--no-deps", "--no-binary", suite.name, "-d", str(folder), suite.package)
                self._pip("download", *words)
                with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
                    archive.extractall(folder, filter="data")
        return next(path for path in folder.iterdir() if path.is_dir()) if suite.has_source else None

    def _variables(self, suite: Suite, folder: Path, *more: Path) -> dict[str, str]:
        return {
            "PYTHONPATH": os.pathsep.join(map(str, (*more, CLIENTS, folder))), "TMPDIR": str(self.temporary),
            "TEMP_DIR": str(self.temporary), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "CUDA_VISIBLE_DEVICES": "",
            "PATH": f"{self.python.parent}{os.pathsep}{os.environ['PATH']}", "SEEN": str(self.work / "seen.json"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.work / "inductor"), "TORCH_EXTENSIONS_DIR": str(self.work / "extensions"),
            **suite.variables,
        }  # fmt: skip

    def run(self, suite: Suite, *options: str, tests: Sequence[str] = (), has_plugin: bool, way: str) -> dict[str, Any]:
        """Run a suite in a fresh folder; return what is compared, and the seconds."""
        source = self._source(suite)
        for path in (self.folder, self.temporary):
            shutil.rmtree(path, ignore_errors=True)
        if source is None:
            self.folder.mkdir()
        else:
            shutil.copytree(source, self.folder, ignore=shutil.ignore_patterns(".git"))
        self.temporary.mkdir()
        seen, junit = self.work / "seen.json", self.work / "junit.xml"
        for path in (seen, junit):
            path.unlink(missing_ok=True)
        variables = self._variables(suite, self.folder, *([self.plugin] if has_plugin else []))
        if way == "ranks":
            variables["ON_RANKS"] = str(self.work / "on_ranks.txt")
        chosen = tests or (suite.tests if suite.has_source else ("--pyargs", *suite.tests))
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        done = subprocess.run(
            [self.python, "-m", "pytest", *WORDS, f"--junitxml={junit}", *suite.options, *options, *chosen],
            cwd=self.folder / (suite.folder if suite.address else "."), env={**os.environ, **variables},
            text=True, capture_output=True, check=False, timeout=LIMIT_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        seconds, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        (self.work / f"{suite.package}-{way}.log").write_text(done.stdout + done.stderr)
        for left in glob.glob(suite.leaves):
            Path(left).unlink(missing_ok=True)
        announced = [path.read_text().splitlines() for path in self.folder.rglob("announcements.jsonl")]
        return {
            "exit": done.returncode, "junit": _cases(junit), "announced": sum(map(len, announced)),
            "files": dict.fromkeys(_files(self.folder, self.temporary)),
            "seen": json.loads(seen.read_text()) if seen.is_file() else {}, "seconds": round(seconds, 1),
            "cpu_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        }  # fmt: skip


def _cases(junit: Path) -> dict[str, list[tuple[str, str]]]:
    """Return, by a test's id without its number of ranks, what kept it from passing, with the message."""
    found: dict[str, list[tuple[str, str]]] = {}
    for case in ElementTree.parse(junit).iter("testcase") if junit.is_file() else ():
        parts = [(part.tag, _plain(part.get("message") or "")) for part in case if part.tag != "system-out"]
        found.setdefault(f"{case.get('classname')}::{_without_size(str(case.get('name')))}", []).extend(parts)
    return found


def _without_size(name: str) -> str:
    """Return a test's name without the parameter that is its number of ranks, which its usual way does not have."""
    return re.sub(r"(?<=\[)\d+-ranks-?", "", name).removesuffix("[]")


def _outcome(parts: list[tuple[str, str]]) -> str:
    # mmengine's processes have ended well where its method says this: see the end of its _check_return_codes.
    kinds = {kind for kind, message in parts if "due to the program abort" not in message}
    return next((kind for kind in ("error", "failure", "skipped") if kind in kinds), "passed")


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


def compare_installed(suites: Suites, suite: Suite) -> dict[str, Any]:
    """Return the row of a suite with the plugin and without it."""
    plain = ("-p", "seen_by_tests")
    without = suites.run(suite, *plain, has_plugin=False, way="without")
    having = suites.run(suite, *plain, has_plugin=True, way="with")
    differ, by_itself = differences(without, having), {}
    if differ:
        by_itself = differences(without, suites.run(suite, *plain, has_plugin=False, way="without"))
        differ = {
            subject: left for subject, entries in differ.items()
            if (left := {k: v for k, v in entries.items() if k not in by_itself.get(subject, {})})
        }  # fmt: skip
    outcomes = list(map(_outcome, having["junit"].values()))
    return {
        "number": len(outcomes), "exit": having["exit"],
        "outcomes": {kind: outcomes.count(kind) for kind in sorted(set(outcomes))}, "differs": differ,
        "differs_without_it": {subject: len(entries) for subject, entries in by_itself.items()},
        "ranks": sum("/verdicts.jsonl" in name for name in having["files"]),
        "seconds": [without["seconds"], having["seconds"]], "cpu_seconds": [without["cpu_seconds"], having["cpu_seconds"]],
    }  # fmt: skip


def compare_on_ranks(suites: Suites, suite: Suite) -> dict[str, Any]:
    """Return the row of a suite on ranks and in its usual way, of the tests that the first runs on ranks."""
    adapters = [word for name in suite.plugin.split() for word in ("-p", name)]
    plugins = (*adapters, "-p", "only_on_ranks", "-p", "no:xdist", "--timeout=120", "-W", "ignore")
    ranked = suites.run(suite, *plugins, has_plugin=True, way="ranks")
    listed = (suites.work / "on_ranks.txt").read_text(encoding="utf-8").splitlines()
    names = list(dict.fromkeys(map(_without_size, listed)))
    size = BATCH if suite.leaves else len(names)
    usual, seconds = dict[str, list[tuple[str, str]]](), 0.0
    for start in range(0, len(names), size):
        batch = names[start : start + size]
        run = suites.run(suite, *suite.usual, "-W", "ignore", tests=batch, has_plugin=False, way="usual")
        usual, seconds = {**usual, **run["junit"]}, seconds + run["seconds"]
    pairs = {
        name: [_outcome(usual[name]) if name in usual else "-", _outcome(its)] for name, its in ranked["junit"].items()
    }
    same = [one for one, other in pairs.values() if one == other]
    return {
        "number": len(pairs), "outcomes": {kind: same.count(kind) for kind in sorted(set(same))},
        "differs": {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}, "announcements": ranked["announced"],
        "seconds": [seconds, ranked["seconds"]],
    }  # fmt: skip


def main() -> int:
    """Run what is requested; returns 1 where a suite differs."""
    parser = parser_of(__doc__)
    parser.add_argument("--work", type=Path, required=True, help="the folder of the environment and sources")
    parser.add_argument("--only", default="", help="packages, comma-separated (default: all)")
    parser.add_argument(
        "--source", action="append", default=[], metavar="NAME=REPOSITORY", help="in place of an address"
    )
    options = parser.parse_args()
    suites, rows = Suites(options.work.resolve(), dict(s.split("=", 1) for s in options.source)), {}
    for suite in (*SUITES, *ON_RANKS):
        if options.only and suite.name not in options.only.split(","):
            continue
        row = (compare_on_ranks if suite.plugin else compare_installed)(suites, suite)
        row = {"pins": PINS, "date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(), "tests": suite.tests, **row}
        rows[suite.package] = row
        print(suite.package, json.dumps({k: v for k, v in row.items() if k != "pins"}), flush=True)
        if options.json is not None:
            kept = json.loads(options.json.read_text()) if options.json.is_file() else {}
            options.json.write_text(json.dumps({**kept, suite.package: row}, indent=1) + "\n")
    return int(any(row["differs"] or row.get("ranks") for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
