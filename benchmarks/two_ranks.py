"""Two ranks, one of which leaves out one call of an epoch: how often the verdict names it.

    python benchmarks/two_ranks.py --seed 20 --programs 200 --json benchmarks/results/two_ranks.json

Neither side has a majority. A program has epochs of steps, and a call more in each epoch: at its start, at its end, or within. In
one epoch one rank leaves that call out, by a flag that the program does not show. Outer and inner loops have six forms each; the
call is made in place, in a helper, or in a helper's helper. In a first epoch, only the program's lines tell which rank is right.
"""

from __future__ import annotations

import random

from generated import HERE, Program, measure

HEAD = """\
import pytest
import torch
import torch.distributed as dist

LEFT_OUT = set()


def leaves_out(epoch):
    return (dist.get_rank(), epoch) in LEFT_OUT


def ready():
    dist.barrier()  # HERE


def checked():
    ready()  # HERE


def step():
    dist.all_reduce(torch.ones(8))


def train(n):
    for _ in range(n):
        step()


"""
# What iterates over the epochs: a header, a line at the end of its body, and what is before it. `number` is the epoch's.
OUTER = {
    "range": ("for number in range(4):", "", ""),
    "enumerate": ("for number, name in enumerate('abcd'):", "", ""),
    "while": ("while number < 4:", "number += 1", "number = 0"),
    "names": ("for name in ('a', 'b', 'c', 'd'):", "", ""),
    "numbered by hand": ("for name in ('a', 'b', 'c', 'd'):", "number += 1", "number = 0"),
    "loader": ("for batch in torch.utils.data.DataLoader(torch.arange(4.0)):", "", ""),
}
INNER = {
    "range": "for _ in range(3):\n    step()",
    "one": "step()",
    "helper": "train(3)",
    "loader": "for item in torch.utils.data.DataLoader(torch.arange(3.0)):\n    step()",
    "while": "left = 3\nwhile left:\n    step()\n    left -= 1",
    "list": "for size in [4, 2, 6]:\n    step()",
}
CALLS = {"in place": "dist.barrier()", "in a helper": "ready()", "two frames below": "checked()"}
NAMED = {"range": "number", "enumerate": "number", "while": "number", "numbered by hand": "number", "names": "'abcd'.index(name)",
         "loader": "int(batch)"}  # fmt: skip


def program(number: int, draw: random.Random) -> Program:
    """Return a program in which one of two ranks leaves one call out."""
    outer, inner, call = (draw.choice(list(table)) for table in (OUTER, INNER, CALLS))
    where, culprit, epoch = draw.choice(("start", "end", "within")), draw.randrange(2), draw.randrange(3)
    header, last, first = OUTER[outer]
    guarded = [f"if not leaves_out({NAMED[outer]}):", f"    {CALLS[call]}  {HERE}"]
    steps = INNER[inner].split("\n")
    body = {"start": [*guarded, *steps], "end": [*steps, *guarded], "within": [*steps, *guarded, *steps]}[where]
    lines = [
        *([first] if first else []),
        header,
        *(f"    {line}" for line in [*body, *([last] if last else [])]),
        "dist.barrier()",
    ]
    name = f"test_{number}"
    text = "\n".join([
        '@pytest.mark.world_size(2)', f"def {name}(group):", f"    LEFT_OUT.add(({culprit}, {epoch}))",
        *(f"    {line}" for line in lines), "",
    ])  # fmt: skip
    kind = f"{outer}, {inner}, {where}, {'first epoch' if epoch == 0 else 'later'}"
    return Program(name=name, text=text, kind=kind, causes=("skipped_collective",), ranks=[culprit])


if __name__ == "__main__":
    measure(__doc__, program, HEAD, count_passed=True)
