"""Other people's tests on ranks beside the way that they are run in: outcomes test by test, time, announcements.

Three clients: torch's own distributed suite (in its wheel; a process per rank and test), ignite's (in its source distribution; two
xdist workers that each run all), and libraries as their users run them (torchrun). Each test's result is written to ``--work`` when
its batch of tests has ended; after an interrupt the script continues there.

    python benchmarks/clients.py --work /tmp/clients --json benchmarks/results/clients.json
"""

from __future__ import annotations

import argparse
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


@dataclass(frozen=True, kw_only=True)
class Client:
    """``names`` are its tests; ``baseline`` and ``ranked`` run each."""

    names: Callable[[], list[str]]
    baseline: Way
    ranked: Way


class Clients:
    """The clients, in an environment and a folder of their own."""

    def __init__(self, work: Path) -> None:
        self.work, self.python = work, work / "venv" / "bin" / "python"
        self.results = work / "results.jsonl"
        self.done = (
            [json.loads(line) for line in self.results.read_text().splitlines()] if self.results.is_file() else []
        )

    def install(self) -> None:
        """Make the environment, once."""
        if self.python.is_file():
            return
        venv.create(self.work / "venv", with_pip=True)
        for words in ((TORCH, "numpy"), (TORCH, *PACKAGES, "-e", str(HERE.parent))):
            subprocess.run([self.python, "-m", "pip", "install", "-q", *words], check=True)
        subprocess.run(
            [self.python, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", IGNITE, "-d", self.work],
            check=True,
        )
        with tarfile.open(next(self.work.glob("pytorch_ignite-*.tar.gz"))) as archive:
            archive.extractall(self.work, filter="data")

    def all(self) -> dict[str, Client]:
        """Return the clients by name."""
        ignite = next(p for p in self.work.glob("pytorch_ignite-*") if p.is_dir())
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
        on_ranks = (f"--artifacts={self.work / 'artifacts'}", "-o", "ranks_artifacts_keep=0")
        ignite_plain = ("-p", "no:cacheprovider", "-W", "ignore")
        return {
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
                    ("-p", "ignite_on_ranks", "-p", "no:xdist", *(f"tests/ignite/{f}" for f in IGNITE_FILES)),
                    {"ONLY_ON_RANKS": "1"},
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

    def run(self, client: str, way_name: str, way: Way, names: list[str]) -> None:
        """Run those that have no result yet, in batches."""
        has = {entry["test"] for entry in self.done if (entry["client"], entry["way"]) == (client, way_name)}
        left = [name for name in names if name not in has]
        size = BATCH if way_name == "baseline" else len(left)  # what takes hours is kept in pieces
        for start in range(0, len(left), max(1, size)):
            batch = left[start : start + size]
            junit = self.work / "junit.xml"
            junit.unlink(missing_ok=True)
            began = time.monotonic()
            done = subprocess.run(
                [self.python, "-m", "pytest", *way.words, f"--junitxml={junit}", *map(way.nodeid, batch)],
                cwd=way.folder, text=True, capture_output=True, check=False, env=self._environment(way.variables),
                timeout=BATCH_LIMIT_S,
            )  # fmt: skip
            seconds = time.monotonic() - began
            (self.work / "last.log").write_text(done.stdout + done.stderr)
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
            last = way.nodeid(name).rpartition("::")[2]
            its = [c for c in cases if c.get("name") == last]  # of xdist's two workers there are two
            bad = [f for c in its for kind in ("failure", "error") for f in c.iter(kind)]
            skips = [s for c in its for s in c.iter("skipped")]
            outcome = "missing" if not its else "failed" if bad else "skipped" if skips else "passed"
            yield {
                "client": client, "way": way_name, "test": name, "outcome": outcome, "seconds": seconds / len(batch),
                "message": str((bad or skips)[0].get("message"))[:400] if bad or skips else "",
            }  # fmt: skip

    def figures(self) -> dict[str, Any]:
        """Return how many outcomes are the same, which are not, and the time of each way, by client."""
        found: dict[str, Any] = {}
        for client in sorted({entry["client"] for entry in self.done}):
            ways = {
                way: {e["test"]: e for e in self.done if (e["client"], e["way"]) == (client, way)}
                for way in ("baseline", "ranked")
            }
            both = sorted(ways["baseline"].keys() & ways["ranked"].keys())
            pairs = [(ways["baseline"][name], ways["ranked"][name]) for name in both]
            same = [a for a, b in pairs if a["outcome"] == b["outcome"]]
            seconds = {way: round(sum(ways[way][name]["seconds"] for name in both), 1) for way in ways}
            found[client] = {
                "compared": len(both), "same": len(same), "seconds": seconds,
                "times_less": round(seconds["baseline"] / seconds["ranked"], 1) if seconds["ranked"] else None,
                "outcomes": {o: sum(a["outcome"] == o for a in same) for o in ("passed", "skipped", "failed")},
                "departures": [
                    {"test": a["test"], "baseline": a["outcome"], "ranked": b["outcome"], "messages": [a["message"], b["message"]]}
                    for a, b in pairs if a["outcome"] != b["outcome"]
                ],
            }  # fmt: skip
        logs = list((self.work / "artifacts").glob("*/announcements.jsonl"))
        return {"clients": found, "announcements": sum(len(log.read_text().splitlines()) for log in logs)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="the folder of the environment, sources and results")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", help="clients, comma-separated")
    parser.add_argument("--ways", default="ranked,baseline")
    options = parser.parse_args()
    clients = Clients(options.work.resolve())
    clients.work.mkdir(parents=True, exist_ok=True)
    clients.install()
    for name, client in clients.all().items():
        if options.only and name not in options.only.split(","):
            continue
        names = client.names()
        for way in options.ways.split(","):
            clients.run(name, way, getattr(client, way), names)
        figures = {"environment": environment(), "packages": [TORCH, *PACKAGES], **clients.figures()}
        if options.json is not None:
            options.json.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(clients.figures(), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
