"""Programs in which one rank decides otherwise, generated: whether a second run names the statement, and the value behind it.

    python benchmarks/first_divergence.py --json benchmarks/results/first_divergence.json

In each program a value of one rank is wrong at some step. 1 to 200 calls later the ranks part by it. The programs differ in form,
in the depth of calls, in the number of ranks, and in what single ranks also do. Their healthy twins run with the recording on:
no statement may be named.
"""

import itertools
import random
import tempfile
from pathlib import Path
from textwrap import indent
from typing import Any

from figures import keep, parser_of, run_tests

from pytest_nsa.diagnosis.divergence import find_divergence
from pytest_nsa.evidence.load import load
from pytest_nsa.report.run import read_verdict

HEAD = """
import threading
import torch
import torch.distributed as dist
from pytest_nsa import world_size

def reduce(n=1):
    dist.all_reduce(torch.ones(n))

class Work:
    def __init__(self, rank, bad):
        self.rank, self.bad, self.count, self.lines = rank, bad, 0, []

    def advance(self, step, k):
        self.count += 2 if self.rank == self.bad and step == k else 1  # VALUE
"""
# The body of a step, after work.advance(step, K) and one reduction. LIMIT is reached K + DELAY steps after the begin.
FORMS = {
    "if": "if work.count == LIMIT:  # HERE\n    reduce(3)",
    "break": "if work.count >= LIMIT:  # HERE\n    break\nreduce(2)",
    "continue": "if work.count == LIMIT:  # HERE\n    continue\nreduce(2)",
    "for": "for _ in range(2 if work.count == LIMIT else 1):  # HERE\n    reduce(2)",
    "while": "left = 2 if work.count == LIMIT else 1\nwhile left:  # HERE\n    left -= 1\n    reduce(2)",
    "return": "save(work, LIMIT)",
    "try": "try:\n    LAST[work.count - LIMIT]  # HERE\nexcept IndexError:\n    continue\nreduce(2)",
    "callback": "hook = HOOKS[work.count == LIMIT]\nhook()  # HERE",
    "comprehension": "[reduce(n) for n in (1, 2) if n == 1 or work.count != LIMIT]  # HERE",
    "generator": "for _ in parts(work, LIMIT):\n    reduce(2)",
    "recursion": "visit(work, LIMIT, 0)",
    "match": "match work.count - LIMIT:  # HERE\n    case 0:\n        reduce(3)\n    case _:\n        pass",
}
HELPERS = """
HOOKS = [lambda: reduce(2), lambda: None]
LAST = [0] * 400  # from 400 steps behind the limit on

def save(work, limit):
    if work.count == limit:  # HERE
        return
    reduce(2)

def parts(work, limit):
    number = 3 if work.count == limit else 2
    while number:  # HERE
        number -= 1
        yield number

def visit(work, limit, depth):
    reduce(2)
    if depth < (1 if work.count == limit else 0):  # HERE
        visit(work, limit, depth + 1)
"""
ALONE = {
    "nothing": "pass",
    "logs": "if work.rank == 0:\n    work.lines.append(f'step {step}')",
    "evaluates": "if work.rank == 1 and step % 3 == 0:\n    sum(range(100))",
    "handles": "try:\n    if work.rank == 0:\n        raise ValueError(step)\nexcept ValueError:\n    pass",
}
TEST = """
def steps{depth}(work):
    for step in range(STEPS):
        work.advance(step, K)
{alone}
        reduce()
{body}

{calls}

@world_size({n})
def test_program(group):
    steps(Work(group.rank, {bad}))
    dist.barrier()
"""


def program(form: str, rng: random.Random, *, is_healthy: bool) -> str:
    """Return a test of a form; the rest is drawn."""
    n, depth, k = rng.randint(2, 8), rng.randint(0, 3), rng.randint(0, 3)
    delay = rng.choice((1, 2, 5, 20, 60))
    limit = k + 1 + delay
    bad, alone = rng.randrange(n), rng.choice(list(ALONE))
    body = FORMS[form].replace("LIMIT", str(limit if form != "try" else limit - 400))
    is_in_a_thread = rng.random() < 0.15
    names = [f"steps{d}" for d in range(depth, -1, -1)]
    calls = "\n".join(f"def {outer}(work):\n    {inner}(work)\n" for inner, outer in itertools.pairwise(names))
    start = "    thread = threading.Thread(target=steps0, args=(work,))\n    thread.start()\n    thread.join()"
    calls += f"\ndef steps(work):\n{start if is_in_a_thread else '    steps0(work)'}\n"
    text = TEST.format(
        depth=depth, alone=indent(ALONE[alone], " " * 8), body=indent(body, " " * 8), calls=calls, n=n,
        bad=-1 if is_healthy else bad,
    )  # fmt: skip
    return HEAD + HELPERS + text.replace("STEPS", str(limit + 3)).replace("advance(step, K)", f"advance(step, {k})")


def run(folder: Path, *options: str, **variables: str) -> dict[str, dict[str, Any]]:
    """Run the programs of a folder; return the last verdict of each, by its file."""
    limits = ("--ranks-keep", "all", "-o", "ranks_timeout=30", "-o", "ranks_hang_after=3")
    found = run_tests(folder, *limits, *options, workers=2, **variables)
    return {nodeid.partition("::")[0]: verdict for nodeid, verdict in found.items()}


def score(folder: Path, file: str, verdict: dict[str, Any]) -> dict[str, Any]:
    """Return whether the statement and the planted value were named."""
    text = (folder / file).read_text().splitlines()
    here = {n for n, line in enumerate(text, start=1) if line.endswith("# HERE")}
    value = next(n for n, line in enumerate(text, start=1) if line.endswith("# VALUE"))
    found = verdict["first_divergence"]
    line = int(found["where"].partition(" in ")[0].rpartition(":")[2]) if found else 0
    reached = any(f":{value} in " in step["where"] for step in found["because"]) if found else False
    return {
        "statement": line in here,
        "value": reached,
        "line": line,
        "certain": verdict["certain"],
        "outcome": verdict["outcome"],
    }


def main() -> None:
    """Measure, print, keep."""
    parser = parser_of(__doc__)
    parser.add_argument("--programs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        for kind in ("faults", "healthy"):
            folder = Path(name) / kind
            folder.mkdir()
            rng = random.Random(arguments.seed)
            forms = [form for _ in range(arguments.programs) for form in FORMS][: arguments.programs]
            for number, form in enumerate(forms):
                text = program(form, rng, is_healthy=kind == "healthy")
                (folder / f"test_{number:02}_{form}.py").write_text(text)
        faults = run(Path(name) / "faults", "--ranks-rerun", "all")
        results["faults"] = {file: score(Path(name) / "faults", file, v) for file, v in sorted(faults.items())}
        healthy = run(Path(name) / "healthy", "--ranks-rerun", "off", NSA_TRACE_FLOW="1")
        latest = Path(name) / "healthy" / "artifacts" / "latest"
        folders = {file: latest / verdict["folder"] for file, verdict in healthy.items()}
        claimed = [
            f for f, folder in folders.items() if find_divergence(load(folder), read_verdict(folder)) is not None
        ]
        results["healthy"] = {
            "programs": len(healthy),
            "passed": sum(v["outcome"] == "PASS" for v in healthy.values()),
            "claimed": claimed,
        }
    rows = results["faults"].values()
    results["totals"] = {key: sum(bool(row[key]) for row in rows) for key in ("statement", "value", "certain")} | {
        "programs": len(rows)
    }
    keep(results, arguments.json)


if __name__ == "__main__":
    main()
