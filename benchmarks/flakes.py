"""How often the suite fails without a reason: `make quick` twenty times, `make test` five times, two of them on busy cores.

It runs in a clone of HEAD, so that work may go on beside it, and adds each run to the file of results when it ends: after an
interrupt it continues from there. A run that failed stays in the file, and is run again. ``--again`` starts from nothing;
``--most N`` ends after N runs.

    python benchmarks/flakes.py --json benchmarks/results/flakes.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from figures import environment

ROOT = Path(__file__).resolve().parents[1]
# Name, number of runs, command, and whether other programs keep the cores busy.
PLAN: tuple[tuple[str, int, tuple[str, ...], bool], ...] = (
    ("test", 1, ("test",), False),
    ("quick", 20, ("quick",), False),
    ("test, busy cores", 2, ("test",), True),
    ("test, -n 4", 1, ("test", "WORKERS=4"), False),
    ("test, random order", 1, ("test", "ARGS=-p randomly"), False),
)


@contextlib.contextmanager
def busy_cores() -> Iterator[None]:
    """Run a process per core that computes."""
    burn = [sys.executable, "-c", "while True: pass"]
    burning = [subprocess.Popen(burn) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in burning:
            process.kill()
            process.wait()


def run(clone: Path, name: str, command: tuple[str, ...], *, busy: bool) -> dict[str, Any]:
    """Run a command once; return its outcome, and the tests that did not pass."""
    junit = clone / "junit.xml"
    junit.unlink(missing_ok=True)
    given = next((word.removeprefix("ARGS=") for word in command if word.startswith("ARGS=")), "")
    words = [word for word in command if not word.startswith("ARGS=")]
    began = time.monotonic()
    with busy_cores() if busy else contextlib.nullcontext():
        done = subprocess.run(
            ["make", *words, f"VENV={ROOT / '.venv'}", "STAMP=", f"ARGS={given} --junitxml={junit}"], cwd=clone, text=True,
            capture_output=True, check=False, env={**os.environ, "PYTHONPATH": str(clone)},
        )  # fmt: skip
    cases = list(ElementTree.parse(junit).iter("testcase")) if junit.is_file() else []
    failed = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    return {
        "run": name, "exit_code": done.returncode, "tests": len(cases), "seconds": round(time.monotonic() - began, 1),
        "failed": [f"{c.get('classname')}::{c.get('name')}" for c in failed],
        "messages": [str(found.get("message"))[:1500] for c in failed for found in (*c.iter("failure"), *c.iter("error"))],
        "last_lines": [] if done.returncode == 0 else done.stdout.splitlines()[-20:],
        "revision": revision(clone), "date": time.strftime("%Y-%m-%d %H:%M"),
    }  # fmt: skip


def revision(folder: Path) -> str:
    """Return the commit that a folder has checked out."""
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=folder, text=True, capture_output=True, check=True
    ).stdout.strip()


def main() -> int:
    """Run what the file of results lacks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="the file of results, which grows")
    parser.add_argument("--again", action="store_true", help="begin anew")
    parser.add_argument("--most", type=int, default=10**6, help="end after so many runs")
    arguments = parser.parse_args()
    runs: list[dict[str, Any]] = []
    if arguments.json.is_file() and not arguments.again:
        runs = json.loads(arguments.json.read_text(encoding="utf-8"))["runs"]
    left = arguments.most
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "clone"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        for name, times, command, busy in PLAN:
            for _ in range(max(0, times - sum(r["run"] == name and not r["exit_code"] for r in runs))):
                if not left:
                    break
                left -= 1
                found = run(clone, name, command, busy=busy)
                runs.append(found)
                partial = arguments.json.with_suffix(".partial")
                partial.write_text(json.dumps({"runs": runs, **environment()}, indent=1) + "\n", encoding="utf-8")
                partial.replace(arguments.json)
                print(
                    f"{name}: exit {found['exit_code']}, {found['tests']} tests, {found['seconds']} s, failed: {found['failed']}",
                    flush=True,
                )
    return int(any(r["failed"] or r["exit_code"] for r in runs))


if __name__ == "__main__":
    sys.exit(main())
