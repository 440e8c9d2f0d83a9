"""Generated schedules with one fault each, which no rule was written for: how often the verdict names cause, ranks and line.

    python benchmarks/schedules.py --seed 20 --programs 60 --json benchmarks/results/schedules.json

A program is one of fifteen schedules of messages, keys and collectives (stages with micro-batches, halos, trees, requests to one
rank, leaders and keys, meshes, handles, gradients by hand, callbacks), on 2 to 7 ranks. In one round of one rank one of its
statements is left out, made again, has another peer or another tag, raises, or its function returns before it. A program in
which the statement is not reached, or where nobody waits for it, ends well: it is not counted. `mutations.py` has loops of
collectives.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figures import keep
from schedules_text import SCHEDULES

HEAD = """\
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

ODD = set()


def is_odd(step):
    return (dist.get_rank(), step) in ODD


"""
KINDS = ("left out",) * 4 + ("once more",) * 3 + ("returned", "raised", "peer", "tag")
CAUSES = {
    "collective": ("skipped_collective",),
    "message": ("p2p_unmatched",),
    "key": ("io_stuck", "missing_collective", "skipped_collective"),
}
ODD = "if is_odd(step):"
_PEER = re.compile(r"(?<=, )(?P<peer>[^,]+?)(?=(, tag=\w+)?\)+$)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A generated test: its text, its schedule and the kind of its fault, and what its verdict must name."""

    name: str
    text: str
    kind: str
    causes: tuple[str, ...]
    ranks: list[int]

    @property
    def lines(self) -> set[int]:
        return {i for i, line in enumerate(self.text.split("\n"), 1) if line.endswith("# HERE")}


def program(number: int, draw: random.Random) -> Program:
    """Return a schedule in which one rank does otherwise in one round."""
    schedule = draw.choice(list(SCHEDULES))
    sizes, source = SCHEDULES[schedule]
    n = draw.choice(sizes)
    culprit, lines = draw.randrange(n), source.rstrip("\n").split("\n")
    at = draw.choice([i for i, line in enumerate(lines) if "#~ " in line])
    statement, _, what = (part.strip() for part in lines[at].partition("#~"))
    kind = draw.choice(KINDS)
    if (kind == "tag" and "tag=" not in statement) or (kind == "peer" and (what != "message" or n == 2)):
        kind = "left out"
    if kind == "peer" and (_PEER.search(statement) is None or "wap(" in statement):
        kind = "left out"
    if kind == "once more" and what == "key":  # setting it again does nothing
        kind = "left out"
    step = draw.randint(2, 6) if schedule == "callbacks" else draw.randint(1, 2 if schedule == "micro-batches" else 3)
    indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
    lines[at : at + 1] = [indent + line for line in _mutated(kind, statement, draw.randrange(n))]
    lines = [line.partition("  #~")[0] for line in lines]
    name = f"test_{number:03d}"
    mark = f"@pytest.mark.world_size({n})\ndef {name}(group):\n    ODD.add(({culprit}, {step}))"
    text = HEAD + "\n".join(lines).replace("def TEST(group):", mark) + "\n"
    causes = CAUSES[what]
    if kind == "once more" and what == "collective":
        causes = ("extra_collective",)
    elif kind == "returned":
        causes = (*causes, "skipped_collective", "p2p_unmatched")
    elif kind == "raised":
        causes = ("rank_exception",)
    return Program(name=name, text=text, kind=f"{schedule}, {what} {kind}", causes=causes, ranks=[culprit])


def _mutated(kind: str, statement: str, peer: int) -> list[str]:
    """Return a statement with a fault of a kind, for the rank and the round that are odd."""
    ranks = f"next(p for p in range({peer}, {peer} + 8) if p % WORLD not in (dist.get_rank(), \\g<peer>)) % WORLD"
    other = _PEER.sub(ranks.replace("WORLD", "dist.get_world_size()"), statement, count=1)
    bodies = {
        "left out": ["if not is_odd(step):", f"    {statement}  # HERE"],
        "once more": [statement, ODD, f"    {statement}  # HERE"],
        "returned": [ODD, "    return  # HERE", f"{statement}  # HERE"],
        "raised": [ODD, "    raise ValueError('a bad batch')  # HERE", statement],
        "tag": [
            ODD,
            "    " + re.sub(r"tag=(\w+)", r"tag=\1 + 50", statement) + "  # HERE",
            "else:",
            f"    {statement}",
        ],
        "peer": [ODD, f"    {other}  # HERE", "else:", f"    {statement}"],
    }
    return bodies[kind]


def run(programs: list[Program], folder: Path, workers: int) -> dict[str, Any]:
    """Run the programs as tests; return how many verdicts are right, by kind of fault."""
    for p in programs:
        (folder / f"{p.name}.py").write_text(p.text)
    options = ("ranks_hang_after=2.5", "ranks_timeout=16")
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-p", "xdist", "-n", str(workers),
         "-c", "/dev/null", "--rootdir", str(folder), *(a for o in options for a in ("-o", o)), str(folder)],
        cwd=folder, capture_output=True, check=False,
    )  # fmt: skip
    lines = (folder / "artifacts" / "latest" / "verdicts.jsonl").read_text().splitlines()
    verdicts = {v["nodeid"].rpartition("::")[2]: v for v in map(json.loads, lines) if v["cause"]}
    right, by_kind, wrong = Counter[str](), Counter[str](), []
    for p in (p for p in programs if p.name in verdicts):
        verdict = verdicts[p.name]
        told = {int(n) for text in (verdict["where"], verdict["called_from"]) for n in re.findall(r":(\d+) in ", text)}
        is_cause, is_ranks = verdict["cause"] in p.causes, verdict["ranks"] == p.ranks
        right.update(
            {
                "cause": is_cause,
                "ranks": is_ranks,
                "cause and ranks": is_cause and is_ranks,
                "line": bool(told & p.lines),
            }
        )
        by_kind[f"{p.kind} -> {verdict['cause']}"] += 1
        if not (is_cause and is_ranks):
            wrong.append(
                {"kind": p.kind, "ranks": p.ranks, "test": p.text.removeprefix(HEAD), "told": verdict["reason"]}
            )
    return {
        "programs": len(programs), "with_a_fault": len(verdicts), "right": dict(right), "by_kind": dict(sorted(by_kind.items())),
        "wrong": wrong,
    }  # fmt: skip


def main() -> None:
    """Generate, run, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--programs", type=int, default=60)
    parser.add_argument("--workers", type=int, default=3, help="tests at a time (default: 3)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        figures = run([program(k, draw) for k in range(arguments.programs)], Path(folder), arguments.workers)
    keep({"seed": arguments.seed, **figures}, arguments.json)


if __name__ == "__main__":
    main()
