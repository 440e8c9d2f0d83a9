"""Generated programs in which ranks disagree on a call: another operation, payload or order, or one more or less under a condition.

    python benchmarks/agreements.py --seed 20 --programs 120 --json benchmarks/results/agreements.json

A program has one to four rounds of two to four calls, in place or in helpers, on 2 to 5 ranks. In one round, the first one too, one
rank makes a call otherwise: by a branch, by a value at the same line, or under one of ten forms of a condition. On two ranks, or
where two sides are equal, and in a first round, nothing may tell which rank is right: all of them are the right answer then.
"""

from __future__ import annotations

import random
import textwrap

from generated import HERE, Program, measure

HEAD = """\
import torch
import torch.distributed as dist
from pytest_nsa import world_size

ODD = set()


def is_odd(step):
    return (dist.get_rank(), step) in ODD


def mean(x):
    dist.all_reduce(x)
    return x / dist.get_world_size()


def log(x):
    rows = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, x)


def share(x):
    dist.broadcast(x, 0)


"""
CALLS = {
    "reduce": "dist.all_reduce(x)", "barrier": "dist.barrier()", "broadcast": "dist.broadcast(x, 0)",
    "mean": "mean(x)", "log": "log(x)", "share": "share(x)",
    "gather": "dist.all_gather([torch.empty(4) for _ in range(n)], x)",
    "objects": "dist.all_gather_object([None] * n, step)",
}  # fmt: skip
# One line, in which what it carries depends on the rank.
VALUES = (
    "dist.all_reduce(torch.ones(6 if is_odd(step) else 3))",
    "dist.all_reduce(torch.ones(3, dtype=torch.float64 if is_odd(step) else torch.float32))",
    "dist.broadcast(x, 1 if is_odd(step) else 0)",
    "dist.all_reduce(x, op=dist.ReduceOp.MAX if is_odd(step) else dist.ReduceOp.SUM)",
    "(dist.barrier if is_odd(step) else lambda: dist.all_reduce(x))()",
)
# Of a call that few ranks make, or that few do not: the condition, with the ranks for which it holds and how it is read.
ALONE = ("rank == {k}", "rank in ({k},)", "rank == {k} and step < 9", "is_odd(step)", "float(x.sum()) < 0")
EXCEPT = ("rank != {k}", "not rank == {k}", "rank not in ({k},)", "not is_odd(step)", "float(x.sum()) >= 0")


def program(number: int, draw: random.Random) -> Program:
    """Return a program in which one rank disagrees with the others on one call."""
    n, rounds = draw.choice([2, 2, 3, 4, 5]), draw.choice([1, 1, 4])
    at, k = draw.randrange(rounds), draw.randrange(n)
    names = draw.sample(list(CALLS), draw.randint(2, 4))
    place = draw.randrange(len(names))
    kind = draw.choice(
        ("operation", "operation", "value", "value", "order", "order", "alone", "except", "groups", "role", "role")
    )
    ranks, causes, body = [k], ("collective_mismatch",), [CALLS[name] for name in names]
    is_tie = n == 2 and at == 0
    if kind == "operation":
        other = draw.choice([c for name, c in CALLS.items() if name not in names])
        body[place] = f"if is_odd(step):\n    {other}  {HERE}\nelse:\n    {body[place]}  {HERE}"
        ranks = list(range(n)) if is_tie else ranks
    elif kind == "value":
        body[place] = f"{draw.choice(VALUES)}  {HERE}"
        ranks = list(range(n)) if is_tie else ranks
    elif kind == "order":
        one, other = body[place], body[place - 1]
        lines = [f"if is_odd(step):\n    {other}  {HERE}\n    {one}\nelse:\n    {one}  {HERE}\n    {other}"]
        body = [c for c in body if c not in (one, other)]
        body[draw.randint(0, len(body)) :] = [*lines, *body[draw.randint(0, len(body)) :]]
        ranks = list(range(n)) if is_tie else ranks
    elif kind == "groups":
        one, other = "dist.all_reduce(torch.ones(2), group=first)", "dist.all_reduce(torch.ones(2), group=second)"
        swapped = f"if is_odd(step):\n    {other}  {HERE}\n    {one}\nelse:\n    {one}  {HERE}\n    {other}"
        body.insert(place, swapped)
        causes, ranks = ("group_order_deadlock",), list(range(n)) if is_tie else ranks
    elif kind == "role":
        return _roles(number, draw)
    elif kind == "some":
        return _some(number, draw)
    else:
        condition = draw.choice(ALONE if kind == "alone" else EXCEPT).format(k=k)
        if not condition.startswith(("rank", "not rank")):
            pass
        elif rounds > 1:
            condition = f"({condition}) and step == {at}" if kind == "alone" else f"({condition}) or step != {at}"
        body[place] = f"if {condition}:\n    {body[place]}  {HERE}"
        causes = ("extra_collective",) if kind == "alone" else ("skipped_collective",)
    name = f"test_{number:03d}"
    loop = f"for step in range({rounds}):"
    setup = [f"ODD.add(({k}, {at}))", "rank, n = dist.get_rank(), dist.get_world_size()"]
    if kind == "groups":
        setup += ["first, second = dist.new_group(list(range(n))), dist.new_group(list(range(n)))"]
    values = ["x = torch.ones(4)", f"x *= -1 if is_odd(step) and {kind in ('alone', 'except')} else 1"]
    if rounds == 1:
        inner = ["step = 0", *values, *body]
    else:
        inner = [loop, *(textwrap.indent(line, "    ") for line in [*values, *body])]
    lines = [*setup, *inner, "dist.barrier()"]
    text = "\n".join(
        [f"@world_size({n})", f"def {name}(group):", *(textwrap.indent(line, "    ") for line in lines), ""]
    )
    told = f"{kind}, {'first round' if at == 0 else 'later'}, {'two ranks' if n == 2 else 'more'}"
    return Program(name=name, text=text, kind=told, causes=causes, ranks=ranks)


def _some(number: int, draw: random.Random) -> Program:
    """Return a program in which a condition on the rank selects some ranks for a call, in place or a frame or two above it."""
    n = draw.choice([3, 4, 4, 5, 6])
    m = draw.randint(1, n - 1)
    chosen, condition = draw.choice((
        (range(m), f"rank < {m}"), (range(m), f"rank in {tuple(range(m))}"), (range(n - m, n), f"rank >= {n - m}"),
        (range(0, n, 2), "rank % 2 == 0"), (range(m), f"group.rank <= {m - 1}"),
    ))  # fmt: skip
    selected, rest = list(chosen), [r for r in range(n) if r not in chosen]
    is_extra = len(selected) <= len(rest)
    own = draw.choice(list(CALLS.values()))
    depth, is_late = draw.randrange(3), draw.random() < 0.5
    name = f"test_{number:03d}"
    helpers = [
        f"def first_{name}(x, n, step):\n    {own}  {HERE}",
        f"def second_{name}(x, n, step):\n    first_{name}(x, n, step)",
    ]
    call = (f"{own}  {HERE}", f"first_{name}(x, n, step)", f"second_{name}(x, n, step)")[depth]
    rounds = ["for step in range(3):", "    dist.all_reduce(x)"] if is_late else ["step = 0"]
    body = [
        *rounds,
        f"if {condition}:",
        f"    {call}",
        *(["dist.all_reduce(torch.ones(2))"] if draw.random() < 0.5 else []),
    ]
    lines = ["rank, n = dist.get_rank(), dist.get_world_size()", "x = torch.ones(4)", *body, "dist.barrier()"]
    text = [
        *(helpers if depth else []),
        f"@world_size({n})",
        f"def {name}(group):",
        *(f"    {line}" for line in lines),
        "",
    ]
    cause, ranks = ("extra_collective", selected) if is_extra else ("skipped_collective", rest)
    return Program(
        name=name,
        text="\n".join(text),
        kind=f"some, {len(selected)} of {n}, depth {depth}",
        causes=(cause,),
        ranks=ranks,
    )


def _roles(number: int, draw: random.Random) -> Program:
    """Return a program of two roles with a group of two for each pair: a call of the pairs that one role makes alone, for the first
    time or after rounds of both, that one rank leaves out, or that one pair makes on the other side of a call of all.
    """
    pairs = draw.choice([1, 2, 2, 3])
    n, kind = 2 * pairs, draw.choice(("alone", "after", "left out", "order"))
    k, at = draw.randrange(n), draw.choice((0, 2))
    own = f"dist.{draw.choice(('all_reduce(torch.ones(3)', 'broadcast(torch.ones(3), rank % ' + str(pairs)))}, group=pair)"
    all_ = "dist.all_reduce(x)"
    setup = [
        f"ODD.add(({k}, {at}))", "rank, n = dist.get_rank(), dist.get_world_size()", "x = torch.ones(4)",
        f"pair = [dist.new_group([i, i + {pairs}]) for i in range({pairs})][rank % {pairs}]",
    ]  # fmt: skip
    first = list(range(pairs))
    if kind in ("alone", "after"):
        body = [f"if rank < {pairs} and step == {at}:\n    {own}  {HERE}", all_]
        setup += ["dist.barrier(group=pair)"] if kind == "after" else []
        causes, ranks = (
            (("skipped_collective",), list(range(pairs, n))) if kind == "after" else (("extra_collective",), first)
        )
    elif kind == "left out":
        body = [f"if not is_odd(step):\n    {own}  {HERE}", all_]
        causes, ranks = ("skipped_collective",), [k]
    else:
        body = [
            f"if is_odd(step):\n    {all_}  {HERE}\n    {own}  {HERE}\nelse:\n    {own}  {HERE}\n    {all_}  {HERE}"
        ]
        causes, ranks = ("group_order_deadlock",), [k] if n > 2 or at else [0, 1]
    inner = ["for step in range(4):", *(textwrap.indent(line, "    ") for line in body)]
    name = f"test_{number:03d}"
    lines = [
        f"@world_size({n})",
        f"def {name}(group):",
        *(textwrap.indent(line, "    ") for line in [*setup, *inner, "dist.barrier()"]),
        "",
    ]
    return Program(
        name=name, text="\n".join(lines), kind=f"role, {kind}, {n} ranks, round {at}", causes=causes, ranks=ranks
    )


if __name__ == "__main__":
    measure(__doc__, program, HEAD, count_passed=False)
