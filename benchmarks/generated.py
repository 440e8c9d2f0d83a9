"""What benchmarks on generated programs share: run each as a test, and count how often the verdict is right."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figures import keep, parser_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests_cpu.faults.recorded import GENERATED, folders_of, pack

HERE = "# HERE"  # ends the lines that a verdict may name


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A generated test: its text, the kind of its fault, and what its verdict must name."""

    name: str
    text: str
    kind: str
    causes: tuple[str, ...]
    ranks: list[int]


def run(
    programs: list[Program], head: str, folder: Path, workers: int, *, count_passed: bool, record: str = ""
) -> dict[str, Any]:
    """Run the programs, each in a file of its own below ``head``; return how many verdicts are right, by kind of fault.

    ``count_passed``: a program that passes counts as a wrong verdict; else it is not counted. ``record``: the archive to keep the
    evidence of the others in, for `fit.py`.
    """
    for p in programs:
        (folder / f"{p.name}.py").write_text(head + p.text)
    options = ("ranks_hang_after=2.5", "ranks_timeout=16")
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-p", "xdist", "-n", str(workers),
         "-c", "/dev/null", "--rootdir", str(folder), *(a for o in options for a in ("-o", o)), str(folder)],
        cwd=folder, capture_output=True, check=False,
    )  # fmt: skip
    lines = (folder / "artifacts" / "latest" / "verdicts.jsonl").read_text().splitlines()
    verdicts = {v["nodeid"].rpartition("::")[2]: v for v in map(json.loads, lines)}
    counted = [p for p in programs if count_passed or verdicts[p.name].get("cause")]
    if record:
        keep_evidence(record, [p for p in programs if verdicts[p.name].get("cause")], folder)
    right, by_kind, wrong = Counter[str](), Counter[str](), []
    for p in counted:
        verdict = verdicts[p.name]
        marked = {i for i, line in enumerate((head + p.text).split("\n"), 1) if line.endswith(HERE)}
        told = {int(n) for text in (verdict["where"], verdict["called_from"]) for n in re.findall(r":(\d+) in ", text)}
        is_cause, is_ranks = verdict["cause"] in p.causes, verdict["ranks"] == p.ranks
        right.update(
            {
                "cause": is_cause,
                "ranks": is_ranks,
                "cause and ranks": is_cause and is_ranks,
                "line": bool(told & marked),
                "wrong and certain": verdict["certain"] and not (is_cause and is_ranks),
            }
        )
        by_kind[f"{p.kind} -> {verdict['cause']}"] += 1
        if not (is_cause and is_ranks):
            wrong.append(
                {
                    "kind": p.kind,
                    "ranks": p.ranks,
                    "certain": verdict["certain"],
                    "test": p.text,
                    "told": verdict["reason"],
                }
            )
    return {
        "programs": len(programs), "with_a_fault": len(counted), "right": dict(right), "by_kind": dict(sorted(by_kind.items())),
        "wrong": wrong,
    }  # fmt: skip


def keep_evidence(name: str, programs: list[Program], folder: Path) -> None:
    """Pack the evidence of programs that ran below ``folder``, with their labels."""
    found = folders_of(folder / "artifacts" / "latest")
    labels = {p.name: {"causes": p.causes, "ranks": p.ranks} for p in programs}
    pack(GENERATED / f"{name}.tar.xz", {p.name: found[p.name] for p in programs}, folder, labels)


def measure(
    description: str | None, program: Callable[[int, random.Random], Program], head: str, *, count_passed: bool
) -> None:
    """Read the command line, generate, run, print, keep."""
    parser = parser_of(description)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--programs", type=int, default=60)
    parser.add_argument("--workers", type=int, default=3, help="tests at a time (default: 3)")
    parser.add_argument("--record", default="", metavar="NAME", help="keep the evidence, to fit the weights to")
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    programs = [program(k, draw) for k in range(arguments.programs)]
    with tempfile.TemporaryDirectory() as folder:
        figures = run(
            programs, head, Path(folder), arguments.workers, count_passed=count_passed, record=arguments.record
        )
    keep({"seed": arguments.seed, **figures}, arguments.json)
