"""Other people's tests on ranks beside the way that they are run in: outcomes test by test, time, announcements.

Three clients from package indexes: torch's own distributed suite (in its wheel; a process per rank and test), ignite's (in its
source distribution; two xdist workers that each run all), and libraries as their users run them (torchrun).

Three that no package has the tests of (client_projects.py): torchsnapshot (torch's elastic launcher), mmengine (a copy of
MultiProcessTestCase) and DeepSpeed (DistributedTest). git clones a pinned tag from their public address. ``--source NAME=PATH``
takes the tag from a git repository on this machine, or uses a folder's files. DeepSpeed's tests compile two operators first, which
needs g++ and ninja; one of them leaves 66 MiB in /dev/shm for each rank of a test, which needs 4 GB.

Each test's result is written to ``--work`` when its batch of tests has ended; after an interrupt the script continues there.

    python benchmarks/clients.py --work /tmp/clients --json benchmarks/results/clients.json
    python benchmarks/clients.py --work /tmp/clients --only deepspeed --source deepspeed=/src/DeepSpeed
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import re
import subprocess
import sys
import tarfile
import time
import venv
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from client_projects import PROJECTS
from figures import environment

HERE = Path(__file__).resolve().parent
CLIENTS = HERE / "clients"
TORCH = "torch==2.13.0"
IGNITE = "pytorch-ignite==0.5.3"
# What the clients' tests import, as of their files of requirements.
PACKAGES = (
    IGNITE, "torchmetrics==1.9.0", "accelerate==1.15.0", "transformers==5.23.0", "lightning==2.6.6", "expecttest", "numpy",
    "scikit-learn", "mock", "pytest-xdist", "filelock",
)  # fmt: skip
CLIENT_NAMES = ("libraries", "ignite", "torch", "torchsnapshot", "mmengine", "deepspeed")
IGNITE_FILES = (
    "distributed/utils/test_native.py", "distributed/test_auto.py", "engine/test_deterministic.py",
    "metrics/test_accuracy.py", "metrics/test_loss.py", "metrics/test_metric.py", "metrics/test_epoch_metric.py",
)  # fmt: skip
BATCH = 20
BATCH_LIMIT_S = 1500.0


@dataclass(frozen=True, kw_only=True)
class Way:
    """How tests are run: pytest's words and variables, in a folder, and the node id of a test's name."""

    words: tuple[str, ...]
    nodeid: Callable[[str], str]
    folder: Path
    variables: dict[str, str]
    selected: Callable[[str], str] = str  # what of a node id pytest is given


def without_size(name: str) -> str:
    """Return a test's name without the parameter that is its number of ranks, which its own way does not have."""
    return re.sub(r"(?<=\[)\d+-ranks-?", "", name).removesuffix("[]")


def address(case: ElementTree.Element) -> tuple[str, str]:
    """Return the class and name of a case of a JUnit file."""
    return str(case.get("classname")), without_size(str(case.get("name")))


def junit_address(nodeid: str) -> tuple[str, str]:
    """Return what ``address`` is of the case of a node id."""
    head, bracket, parameters = nodeid.partition("[")
    path, *classes, name = head.split("::")
    return ".".join((path.removesuffix(".py").replace("/", "."), *classes)), name + bracket + parameters


@dataclass(frozen=True, kw_only=True)
class Client:
    """``names`` are its tests; ``baseline`` and ``ranked`` run each."""

    names: Callable[[], list[str]]
    baseline: Way
    ranked: Way
    leaves: str = ""  # as in Project


class Clients:
    """The clients, in an environment and a folder of their own."""

    def __init__(self, work: Path, sources: dict[str, str]) -> None:
        self.work, self.python, self.sources = work, work / "venv" / "bin" / "python", sources
        self.results = work / "results.jsonl"
        self.done = (
            [json.loads(line) for line in self.results.read_text().splitlines()] if self.results.is_file() else []
        )

    def install(self) -> None:
        """Make the environment, once."""
        if not self.python.is_file():
            venv.create(self.work / "venv", with_pip=True)
            self._pip("install", TORCH, "numpy", "setuptools")
            self._pip("install", TORCH, *PACKAGES, "-e", str(HERE.parent))

    def _pip(self, *words: str) -> None:
        subprocess.run([self.python, "-m", "pip", words[0], "-q", *words[1:]], check=True)

    def client(self, name: str) -> Client:
        """Return a client; get its tests and install what they need, once."""
        return self._project(name) if name in PROJECTS else self._packaged(name)

    def _ignite(self) -> Path:
        found = [path for path in self.work.glob("pytorch_ignite-*") if path.is_dir()]
        if not found:
            self._pip("download", "--no-deps", "--no-binary", ":all:", IGNITE, "-d", str(self.work))
            with tarfile.open(next(self.work.glob("pytorch_ignite-*.tar.gz"))) as archive:
                archive.extractall(self.work, filter="data")
            return self._ignite()
        return found[0]

    def _files_of(self, name: str) -> Path:
        """Return the folder with a project's files: as given, or exported from the tag of a repository."""
        project, given = PROJECTS[name], self.sources.get(name)
        if given is not None and not any((Path(given) / part).exists() for part in (".git", "HEAD")):
            return Path(given).resolve()
        folder = self.work / f"{name}-{project.tag}"
        if not folder.is_dir():
            repository = given
            if repository is None:
                repository = str(self.work / f"{name}.git")
                words = ("clone", "-q", "--bare", "--depth", "1", "--branch", project.tag, project.address, repository)
                subprocess.run(["git", *words], check=True)
            archive = self.work / f"{name}.tar"
            words = ("archive", "-o", str(archive), project.tag, *project.parts)
            subprocess.run(["git", "-C", repository, *words], check=True)
            with tarfile.open(archive) as opened:
                opened.extractall(folder, filter="data")
        return folder

    def _project(self, name: str) -> Client:
        """Return a client of PROJECTS, with its own tests that its plugin marks."""
        project, root = PROJECTS[name], self._files_of(name)
        variables = {
            "PYTHONPATH": os.pathsep.join((str(root), str(CLIENTS))), "CUDA_VISIBLE_DEVICES": "",
            "TORCH_EXTENSIONS_DIR": str(self.work / "extensions"), "DS_ACCELERATOR": "cpu",
            "LOCAL_SIZE": "4",  # the devices that DeepSpeed takes a CPU for
        }  # fmt: skip
        ready = self.work / f"{name}.ready"
        if not ready.is_file():
            self._pip("install", TORCH, *project.packages)
            subprocess.run([self.python, "-c", project.prepare], check=True, env=self._environment(variables))
            ready.touch()
        folder = root / project.folder
        words = ("-p", "no:cacheprovider", "-W", "ignore", "--color=no")
        on_ranks = (*self._artifacts(name), "-p", project.plugin, "-p", "only_on_ranks", "--timeout=120")
        listed = self.work / f"{name}.names"

        def names() -> list[str]:
            command = [self.python, "-m", "pytest", "--collect-only", *words, *on_ranks, *project.files]
            environment = self._environment({**variables, "ONLY_ON_RANKS": str(listed)})
            subprocess.run(command, cwd=folder, check=True, env=environment, stdout=subprocess.DEVNULL)
            return list(dict.fromkeys(map(without_size, listed.read_text(encoding="utf-8").splitlines())))

        return Client(
            names=names,
            baseline=Way(words=(*words, "-p", "no:nsa"), nodeid=str, folder=folder, variables=variables),
            leaves=project.leaves,
            ranked=Way(
                words=(*words, *on_ranks), nodeid=str, folder=folder, variables=variables,
                selected=lambda name: name.partition("[")[0],  # all its parameters: the number of ranks may be one
            ),
        )  # fmt: skip

    def _artifacts(self, name: str) -> tuple[str, ...]:
        return (f"--ranks-artifacts={self.work / 'artifacts' / name}", "-o", "ranks_artifacts_keep=0")

    def _packaged(self, name: str) -> Client:
        """Return a client whose tests a package has."""
        ignite = self._ignite() if name == "ignite" else self.work
        plain = (
            "-c",
            os.devnull,
            f"--rootdir={CLIENTS}",
            f"--confcutdir={CLIENTS}",
            "-p",
            "no:randomly",
            "-p",
            "no:cacheprovider",
            "-W",
            "ignore",
        )
        torch_variables = {"BACKEND": "gloo", "WORLD_SIZE": "3", "TEMP_DIR": str(self.work)}
        on_ranks = self._artifacts(name)
        ignite_plain = ("-p", "no:cacheprovider", "-W", "ignore")
        clients = {
            "libraries": Client(
                names=lambda: self._collect(CLIENTS, (*plain, "libraries.py"), {}, r"test_on_ranks\[(.+)\]"),
                baseline=Way(
                    words=(*plain, "-p", "no:nsa"), nodeid=lambda n: f"libraries.py::test_torchrun[{n}]",
                    folder=CLIENTS, variables={},
                ),
                ranked=Way(
                    words=(*plain, *on_ranks), nodeid=lambda n: f"libraries.py::test_on_ranks[{n}]", folder=CLIENTS, variables={}
                ),
            ),
            "ignite": Client(
                names=lambda: self._collect(
                    ignite,
                    (
                        "-p", "ignite_on_ranks", "-p", "only_on_ranks", "-p", "no:xdist",
                        *(f"tests/ignite/{f}" for f in IGNITE_FILES),
                    ),
                    {},
                    r"(tests/ignite/.+::.+)",
                ),
                baseline=Way(
                    words=(*ignite_plain, "-p", "no:nsa", "--dist=each", "--tx", f"2*popen//python={self.python}"),
                    nodeid=str, folder=ignite, variables={"WORLD_SIZE": "2"},
                ),
                ranked=Way(
                    words=(*ignite_plain, *on_ranks, "-p", "ignite_on_ranks", "-p", "no:xdist", "--timeout=120"),
                    nodeid=str, folder=ignite, variables={"WORLD_SIZE": "2"},  # by which some are skipped, or not
                ),
            ),
            "torch": Client(
                names=lambda: self._collect(CLIENTS, (*plain, "torch_suite.py"), torch_variables, r"TestOnRanks::(\w+)"),
                baseline=Way(
                    words=(*plain, "-p", "no:nsa"), nodeid=lambda n: f"torch_suite.py::TestSpawned::{n}", folder=CLIENTS,
                    variables=torch_variables,
                ),
                ranked=Way(
                    words=(*plain, *on_ranks, "--timeout=120"), nodeid=lambda n: f"torch_suite.py::TestOnRanks::{n}",
                    folder=CLIENTS, variables=torch_variables,
                ),
            ),
        }  # fmt: skip
        return clients[name]

    def _environment(self, variables: dict[str, str]) -> dict[str, str]:
        ours = {
            "PATH": f"{self.python.parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": f"{CLIENTS}{os.pathsep}.",
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        return {**os.environ, **ours, **variables}

    def _collect(self, folder: Path, words: Iterable[str], variables: dict[str, str], pattern: str) -> list[str]:
        done = subprocess.run(
            [self.python, "-m", "pytest", "--collect-only", "-q", "-o", "addopts=", *words], cwd=folder, text=True,
            capture_output=True, check=False, env=self._environment(variables),
        )  # fmt: skip
        found = [match.group(1) for line in done.stdout.splitlines() if (match := re.search(pattern, line))]
        if not found:
            raise SystemExit(f"no tests found in {folder}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        return found

    def run(self, client: str, way_name: str, way: Way, names: list[str], leaves: str) -> None:
        """Run those that have no result yet, in batches."""
        has = {entry["test"] for entry in self.done if (entry["client"], entry["way"]) == (client, way_name)}
        left = [name for name in names if name not in has]
        size = BATCH if way_name == "baseline" or leaves else len(left)  # what takes hours is kept in pieces
        for start in range(0, len(left), max(1, size)):
            batch = left[start : start + size]
            selected = dict.fromkeys(way.selected(way.nodeid(name)) for name in batch)
            junit = self.work / "junit.xml"
            junit.unlink(missing_ok=True)
            began = time.monotonic()
            done = subprocess.run(
                [self.python, "-m", "pytest", *way.words, f"--junitxml={junit}", *selected],
                cwd=way.folder, text=True, capture_output=True, check=False, env=self._environment(way.variables),
                timeout=BATCH_LIMIT_S,
            )  # fmt: skip
            seconds = time.monotonic() - began
            (self.work / "last.log").write_text(done.stdout + done.stderr)
            for path in glob.glob(leaves):
                Path(path).unlink(missing_ok=True)
            entries = list(self._entries(client, way_name, batch, way, junit, seconds))
            with self.results.open("a") as log:
                log.writelines(json.dumps(entry) + "\n" for entry in entries)
            self.done += entries
            print(f"{client}, {way_name}: {start + len(batch)} of {len(left)}, {seconds:.0f} s", flush=True)

    def _entries(
        self, client: str, way_name: str, batch: list[str], way: Way, junit: Path, seconds: float
    ) -> Iterator[dict[str, Any]]:
        cases = list(ElementTree.parse(junit).iter("testcase")) if junit.is_file() else []
        for name in batch:
            # Of xdist's two workers there are two, of a test on 1, 2 and 4 ranks three.
            its = [c for c in cases if address(c) == junit_address(way.nodeid(name))]
            bad = [f for c in its for kind in ("failure", "error") for f in c.iter(kind)]
            # mmengine's processes have ended well where its method says this: see the end of its _check_return_codes.
            skips = [
                s for c in its for s in c.iter("skipped") if "due to the program abort" not in str(s.get("message"))
            ]
            outcome = "missing" if not its else "failed" if bad else "skipped" if skips else "passed"
            yield {
                "client": client, "way": way_name, "test": name, "outcome": outcome, "seconds": seconds / len(batch),
                "message": str((bad or skips)[0].get("message"))[:400] if bad or skips else "",
            }  # fmt: skip

    def figures(self, client: str) -> dict[str, Any]:
        """Return how many outcomes are the same, which are not, the time of each way, and what was announced on ranks."""
        ways = {
            way: {e["test"]: e for e in self.done if (e["client"], e["way"]) == (client, way)}
            for way in ("baseline", "ranked")
        }
        both = sorted(ways["baseline"].keys() & ways["ranked"].keys())
        pairs = [(ways["baseline"][name], ways["ranked"][name]) for name in both]
        same = [a for a, b in pairs if a["outcome"] == b["outcome"]]
        seconds = {way: round(sum(ways[way][name]["seconds"] for name in both), 1) for way in ways}
        logs = list((self.work / "artifacts" / client).glob("*/announcements.jsonl"))
        packages = [TORCH, f"{client} {PROJECTS[client].tag}"] if client in PROJECTS else [TORCH, *PACKAGES]
        return {
            "environment": environment(), "packages": packages, "compared": len(both), "same": len(same), "seconds": seconds,
            "times_less": round(seconds["baseline"] / seconds["ranked"], 1) if seconds["ranked"] else None,
            "outcomes": {o: sum(a["outcome"] == o for a in same) for o in ("passed", "skipped", "failed")},
            "departures": [
                {"test": a["test"], "baseline": a["outcome"], "ranked": b["outcome"], "messages": [a["message"], b["message"]]}
                for a, b in pairs if a["outcome"] != b["outcome"]
            ],
            "announcements": sum(len(log.read_text().splitlines()) for log in logs),
        }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="the folder of the environment, sources and results")
    parser.add_argument("--json", type=Path, help="write the clients' rows there; those of other clients stay")
    parser.add_argument("--only", default=",".join(CLIENT_NAMES), help="clients, comma-separated (default: all)")
    parser.add_argument("--ways", default="ranked,baseline")
    parser.add_argument(
        "--source", action="append", default=[], metavar="NAME=PATH",
        help=f"the files, or a git repository, of {', '.join(PROJECTS)} (default: git clones the tag)",
    )  # fmt: skip
    options = parser.parse_args()
    only, sources = options.only.split(","), dict(given.split("=", 1) for given in options.source if "=" in given)
    wrong = [name for name in only if name not in CLIENT_NAMES] + [name for name in sources if name not in PROJECTS]
    if wrong or len(sources) < len(options.source):
        parser.error(f"{', '.join(wrong) or '--source without NAME='}: clients are {', '.join(CLIENT_NAMES)}")
    clients = Clients(options.work.resolve(), sources)
    clients.work.mkdir(parents=True, exist_ok=True)
    clients.install()
    for name in only:
        client = clients.client(name)
        names = client.names()
        for way in options.ways.split(","):
            clients.run(name, way, getattr(client, way), names, client.leaves)
        figures = clients.figures(name)
        print(name, json.dumps(figures, indent=1))
        if options.json is not None:
            rows = json.loads(options.json.read_text()) if options.json.is_file() else {}
            options.json.write_text(json.dumps({**rows, name: figures}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
