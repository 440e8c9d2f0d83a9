"""What every benchmark does with its figures: add the machine and the versions, print them, keep them where ``--json`` names.

python benchmarks/figures.py JUNIT EXIT_CODE OUT keeps outcome and seconds of every test of a JUnit file.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from nsa.trace.strict_json import to_json

ROOT = Path(__file__).resolve().parents[1]


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of a benchmark's options with ``--json``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    return parser


def environment() -> dict[str, Any]:
    """Return the machine and versions that figures belong to."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "device": gpu or platform.processor() or platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__,
        "python": platform.python_version(), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def keep(figures: dict[str, Any], path: Path | None) -> None:
    """Print ``figures`` and the environment as JSON; write them to ``path``, if any."""
    text = to_json({**figures, **environment()}, indent=1)
    print(text)
    if path is not None:
        path.write_text(text + "\n", encoding="utf-8")


def train(config: str, steps: int, settings: Mapping[str, Any], ranks: int = 1) -> list[dict[str, Any]]:
    """Train by `nsa.train` with a file of configs/; return the metrics of each step. RuntimeError with its errors if it fails."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    options = ["--config", str(ROOT / "configs" / config), "--steps", str(steps), "--save-every", "0"]
    options += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, *launcher, "-m", "nsa.train", *options, "--out", folder], cwd=ROOT, text=True, capture_output=True,
            check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def run_tests(folder: Path, *options: str, workers: int = 0, **variables: str) -> dict[str, dict[str, Any]]:
    """Run the tests of a folder, ``workers`` at a time; return the last verdict of each. The run is FOLDER/artifacts/latest."""
    plain = f"-q -p no:cacheprovider -p no:randomly -p xdist -n {workers} --rootdir={folder} -c {os.devnull}".split()
    command = [sys.executable, "-m", "pytest", *plain, *options, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    subprocess.run(command, cwd=folder, capture_output=True, check=False, env=environment)
    lines = (folder / "artifacts" / "latest" / "verdicts.jsonl").read_text().splitlines()
    return {verdict["nodeid"]: verdict for verdict in map(json.loads, lines)}


def keep_junit(junit: str, exit_code: str, out: str) -> None:
    """Read a JUnit file; print and keep its figures."""
    cases = list(ElementTree.parse(junit).iter("testcase"))
    kinds = ("failure", "error", "skipped")
    tests = [
        {
            "name": case.get("name"),
            "outcome": next((kind for kind in kinds if case.find(kind) is not None), "passed"),
            "seconds": float(case.get("time") or 0),
        }
        for case in cases
    ]
    cuda = {"cuda": torch.version.cuda, "gpus": torch.cuda.device_count()}
    keep({**cuda, "exit_code": int(exit_code), "tests": tests}, Path(out))


if __name__ == "__main__":
    parser = parser_of(__doc__)
    for argument in ("junit", "exit_code", "out"):
        parser.add_argument(argument)
    given = parser.parse_args()
    keep_junit(given.junit, given.exit_code, given.out)
