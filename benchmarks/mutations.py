"""Generated programs with one fault each, which no rule was written for: how often the verdict names cause, ranks and line.

    python benchmarks/mutations.py --seed 20 --programs 60 --json benchmarks/results/mutations.json

A program is six rounds of three to six statements, of sixteen kinds (collectives over all ranks and over halves, a ring of sends
and receives, a step under DDP, helpers that make several calls), on 2 to 5 ranks. One or two ranks do otherwise in one round: a
statement is left out, made again or another one in addition, two change places, the loop is left or its round cut short, an
exception is swallowed or raised. Some ways to go wrong cannot be told apart when they hang: two calls that changed places look
like one more or one less (docs/limitations.md).
"""

from __future__ import annotations

import random

from generated import Program, measure

HEAD = """\
import time
import torch
import torch.distributed as dist
from torch import nn
from pytest_nsa import world_size


class Meter:
    def __init__(self):
        self.values = torch.zeros(3)

    def sync(self):
        dist.all_reduce(self.values)

    def table(self):
        rows = [None] * dist.get_world_size()
        dist.all_gather_object(rows, self.values.tolist())


def evaluate(meter):
    dist.all_reduce(torch.tensor([8]))
    meter.sync()


def ring(x, rank, n):
    sent = dist.isend(x, (rank + 1) % n)
    got = torch.empty_like(x)
    dist.recv(got, (rank - 1) % n)
    sent.wait()


def train_step(model, optimizer):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()


def shard(x, n):
    dist.reduce_scatter_tensor(torch.empty(x.shape[0] // n, x.shape[1]), x)


"""
STATEMENTS = {
    "loss": "dist.all_reduce(loss)",
    "barrier": "dist.barrier()",
    "broadcast": "dist.broadcast(w, 0)",
    "gather": "dist.all_gather([torch.empty(4) for _ in range(n)], w)",
    "sync": "meter.sync()",
    "table": "meter.table()",
    "train": "train_step(model, optimizer)",
    "shard": "shard(torch.ones(4 * n, 2), n)",
    "half": "dist.all_reduce(torch.ones(2), group=mine)",
    "ring": "ring(w, rank, n)",
    "evaluate": "evaluate(meter)",
    "objects": "dist.broadcast_object_list(settings, 0)",
    "async": "work = dist.all_reduce(big, async_op=True); local(); work.wait()",
    "all to all": "dist.all_to_all_single(torch.empty(2 * n), torch.ones(2 * n))",
    "norm": "dist.all_reduce(norm, op=dist.ReduceOp.MAX)",
    "local": "local()",
}
KINDS = (
    "left out",
    "left out",
    "left out",
    "once more",
    "once more",
    "places changed",
    "break",
    "continue",
    "swallowed",
    "raised",
)
CAUSES = {
    "once more": ("extra_collective",),
    "places changed": ("collective_mismatch", "group_order_deadlock"),
    "raised": ("rank_exception",),
}
ODD = "if (rank, step) in odd:"


def program(number: int, draw: random.Random) -> Program:
    """Return a program of statements in a loop, with a fault in one round of one or two ranks."""
    n = draw.choice([2, 3, 3, 4, 4, 5])
    names = draw.sample(list(STATEMENTS), draw.randint(3, 6))
    names = [x for x in names if not (x == "ring" and n == 2) and not (x == "half" and n < 4)]
    if all(x in ("local", "ring") for x in names):
        names.append("loss")
    calls = [i for i, name in enumerate(names) if name != "local"]
    culprits = sorted(draw.sample(range(n), 2 if n == 5 and draw.random() < 0.3 else 1))
    at, kind = draw.choice(calls), draw.choice(KINDS)
    if (kind == "places changed" and len(calls) < 2) or (kind == "once more" and names[at] == "ring"):
        kind = "left out"
    other = draw.choice([i for i in calls if i != at]) if kind == "places changed" else -1
    name = f"test_{number:03d}"
    lines = [
        f"@world_size({n})",
        f"def {name}({'ddp' if 'train' in names else 'group'}):",
        "    rank, n = dist.get_rank(), dist.get_world_size()",
        f"    odd = {{(r, {draw.randint(2, 4)}) for r in {culprits}}}",
        "    loss, w, norm, big = torch.ones(1), torch.ones(4), torch.ones(1), torch.ones(1000)",
        "    meter, settings = Meter(), [{'rate': 0.1}]",
        f"    local = lambda: time.sleep({draw.choice([0.002, 0.002, 0.03])} * (1 + rank))",
    ]
    if "train" in names:
        lines += [
            "    model = ddp.wrap(nn.Linear(8, 1))",
            "    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)",
        ]
    if "half" in names:
        lines += [
            "    mine = [dist.new_group(list(range(n // 2))), dist.new_group(list(range(n // 2, n)))][rank >= n // 2]"
        ]
    lines.append("    for step in range(6):")
    for i, statement in enumerate(STATEMENTS[x] for x in names):
        body = [statement]
        if kind == "places changed" and i in (at, other):
            swapped = STATEMENTS[names[other if i == at else at]]
            body = [ODD, f"    {swapped}  # HERE", "else:", f"    {statement}  # HERE"]
        elif i == at:
            body = _mutated(kind, statement, STATEMENTS[draw.choice([names[at], "loss", "barrier", "sync", "table"])])
        lines += [f"        {line}" for line in body]
    lines.append("    dist.barrier()")
    causes = CAUSES.get(kind, ("skipped_collective",))
    causes += ("p2p_unmatched",) if names[at] == "ring" and kind != "raised" else ()
    return Program(name=name, text="\n".join(lines) + "\n", kind=kind, causes=causes, ranks=culprits)


def _mutated(kind: str, statement: str, extra: str) -> list[str]:
    """Return a statement with a fault of a kind, for the ranks and the round that are odd."""
    bodies = {
        "left out": ["if (rank, step) not in odd:", f"    {statement}  # HERE"],
        "once more": [statement, ODD, f"    {extra}  # HERE"],
        "break": [ODD, "    break  # HERE", f"{statement}  # HERE"],
        "continue": [ODD, "    continue  # HERE", f"{statement}  # HERE"],
        "swallowed": [
            "try:", f"    {ODD}", "        raise ValueError('a bad batch')  # HERE", f"    {statement}  # HERE",
            "except ValueError:", "    pass",
        ],
        "raised": [ODD, "    raise ValueError('a bad batch')  # HERE", statement],
    }  # fmt: skip
    return bodies[kind]


if __name__ == "__main__":
    measure(__doc__, program, HEAD, count_passed=True)
