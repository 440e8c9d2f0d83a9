"""Generated schedules with one fault each, which no rule was written for: how often the verdict names cause, ranks and line.

    python benchmarks/schedules.py --seed 20 --programs 60 --json benchmarks/results/schedules.json

A program is one of 25 schedules of messages, keys and collectives (stages with micro-batches, halos, trees, requests to one rank,
leaders and keys, meshes, handles, gradients by hand, callbacks, evaluation, checkpoints, experts), on 2 to 7 ranks. In one round
of one rank one of its statements is left out, made again, has another peer or another tag, raises, or its function returns
before it. A program in which that rank does not come to the statement, or no rank needs it, passes: it is not counted.
`mutations.py` has loops of collectives.
"""

from __future__ import annotations

import random
import re

import schedules_text
import schedules_training
from generated import Program, measure

SCHEDULES = schedules_text.SCHEDULES | schedules_training.SCHEDULES
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
    text = "\n".join(lines).replace("def TEST(group):", mark) + "\n"
    causes = CAUSES[what]
    if kind == "once more" and what == "collective":
        causes = ("extra_collective",)
    elif kind == "returned":
        causes = (*causes, "skipped_collective", "p2p_unmatched", "rank_exception")  # the last where its result is used
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


if __name__ == "__main__":
    measure(__doc__, program, HEAD, count_passed=False)
