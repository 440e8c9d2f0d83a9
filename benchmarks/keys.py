"""Generated programs that exchange keys of a store, in which one rank sets, awaits or counts differently from the others.

    python benchmarks/keys.py --seed 20 --programs 120 --json benchmarks/results/keys.json

Ranks meet by keys, follow a leader, pass parts around a ring, or gather them, on 2 to 6 ranks, in one round or several, with or
without a collective. One rank leaves out a call, uses another name, or makes a round more or less.
"""

from __future__ import annotations

import random
import textwrap
from dataclasses import dataclass

from generated import HERE, Program, measure

HEAD = """\
import time
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store as default_store
from pytest_nsa import world_size

ODD = set()


def is_odd(step):
    return (dist.get_rank(), step) in ODD


def publish(store, key, value="1"):
    store.set(key, value)


def fetch(store, key):
    return store.get(key)


def count(store, key):
    store.add(key, 1)


def until(store, key, number):
    while store.add(key, 0) < number:
        time.sleep(0.01)


"""
EDITS = ("drop", "drop", "drop", "name", "fewer rounds", "more rounds")


@dataclass(frozen=True, slots=True)
class Step:
    """What ranks do next: those for which ``where`` holds make ``call``, in which ``{step}`` names the round."""

    call: str
    where: str = "True"

    def is_of(self, rank: int, n: int, step: int) -> bool:
        return bool(eval(self.where, {"rank": rank, "n": n, "step": step}))  # of this file's own texts


ALL = '[f"{name}/{step}/{r}" for r in range(n)]'
PATTERNS: dict[str, tuple[Step, ...]] = {
    "barrier": (Step('store.set(f"{name}/{step}/{rank}", "1")'), Step(f"store.wait({ALL})")),
    "one by one": (
        Step('publish(store, f"{name}/{step}/{rank}")'),
        Step('for other in range(n):\n    fetch(store, f"{name}/{step}/{other}")'),
    ),
    "leader": (
        Step('store.set(f"{name}/{step}", "1")', "rank == 0"),
        Step('store.get(f"{name}/{step}")', "rank > 0"),
    ),
    "leader in helpers": (
        Step('publish(store, f"{name}/{step}")', "rank == n - 1"),
        Step('fetch(store, f"{name}/{step}")', "rank < n - 1"),
    ),
    "turns": (
        Step('store.set(f"{name}/{step}", str(rank))', "step % n == rank"),
        Step('store.get(f"{name}/{step}")', "step % n != rank"),
    ),
    "ring": (
        Step('store.set(f"{name}/{step}/{rank}", "1")'),
        Step('store.get(f"{name}/{step}/{(rank - 1) % n}")'),
    ),
    "gather": (
        Step('publish(store, f"{name}/part/{step}/{rank}")', "rank > 0"),
        Step('for other in range(1, n):\n    fetch(store, f"{name}/part/{step}/{other}")', "rank == 0"),
        Step('publish(store, f"{name}/sum/{step}")', "rank == 0"),
        Step('fetch(store, f"{name}/sum/{step}")', "rank > 0"),
    ),
    "counter": (Step('count(store, f"{name}/{step}")'), Step('until(store, f"{name}/{step}", n)')),
}
STORES = ("default_store()", 'dist.PrefixStore("job", default_store())')
COLLECTIVES = ("dist.all_reduce(total)", "dist.barrier()", "dist.broadcast(total, 0)")


def program(number: int, draw: random.Random) -> Program:
    """Return a program in which one rank departs from the pattern."""
    n, rounds = draw.choice([2, 2, 3, 4, 5, 6]), draw.choice([1, 4, 4])
    at, k = draw.randrange(rounds), draw.randrange(n)
    test = f"test_{number:03d}"
    if draw.random() < 0.06:
        return _nobody(test, n, rounds, at)
    while True:
        pattern, edit = draw.choice(list(PATTERNS)), draw.choice(EDITS)
        steps = list(PATTERNS[pattern])
        if draw.random() < 0.7:
            steps.insert(draw.randint(0, 1) * len(steps), Step(draw.choice(COLLECTIVES)))
        odd = draw.choice(("is_odd(step)", "is_odd(step)", f"rank == {k} and step == {at}"))
        body = _edited(steps, edit, (k, n, at), odd, draw)
        if body is not None and not (edit.endswith("rounds") and rounds == 1):
            break
    what, lines = body
    if draw.random() < 0.3:
        lines = [line.replace("}/{rank}", "}/of/{rank}").replace("}/{other}", "}/of/{other}").replace("}/{r}", "}/of/{r}")
                 .replace("}/{(rank", "}/of/{(rank") for line in lines]  # fmt: skip
    is_more = edit == "more rounds"
    loop = [f"for step in range({rounds}{' + is_odd(-1)' if is_more else ''}):"]
    loop += [textwrap.indent(line, "    ") for line in lines]
    setup = [
        f"ODD.add(({k}, {-1 if is_more else at}))", "rank, n = dist.get_rank(), dist.get_world_size()",
        f'store, name, total = {draw.choice(STORES)}, "{draw.choice(["plan", "shards", "epoch"])}", torch.ones(3)',
    ]  # fmt: skip
    end = ["dist.barrier()"] if draw.random() < 0.5 else []
    text = [f"@world_size({n})", f"def {test}(group):", *(textwrap.indent(t, "    ") for t in [*setup, *loop, *end])]
    of_a_collective = "skipped_collective" if edit in ("drop", "fewer rounds") else "extra_collective"
    causes: tuple[str, ...] = ("missing_collective",)
    if what == "collective":
        causes = (of_a_collective,)
    elif what == "round":  # of a round, either may be what the ranks wait for
        causes = ("missing_collective", "io_stuck", of_a_collective)
    elif edit == "name":
        causes = ("missing_collective", "io_stuck")
    kind = f"{pattern}, {edit} {what}, {'two ranks' if n == 2 else 'more'}"
    return Program(name=test, text="\n".join([*text, ""]), kind=kind, causes=causes, ranks=[k])


def _nobody(test: str, n: int, rounds: int, at: int) -> Program:
    """Return a program in which no rank sets what all wait for in round ``at``."""
    text = [
        f"@world_size({n})",
        f"def {test}(group):",
        "    rank, store = dist.get_rank(), default_store()",
        f"    for step in range({rounds}):",
        f"        if rank == (0 if step != {at} else {n}):",
        '            store.set(f"plan/{step}", "1")',
        f'        store.get(f"plan/{{step}}")  {HERE}',
        "",
    ]
    causes = ("io_stuck", "missing_collective")
    return Program(name=test, text="\n".join(text), kind="nobody sets it", causes=causes, ranks=list(range(n)))


def _edited(
    steps: list[Step], edit: str, at: tuple[int, int, int], odd: str, draw: random.Random
) -> tuple[str, list[str]] | None:
    """Return what is edited, and the lines of a round in which a rank makes the ``edit`` where ``odd``; None for no such.

    ``at``: the rank, the number of ranks, the round.
    """
    k, n, round_ = at
    mine = [i for i, step in enumerate(steps) if step.is_of(k, n, round_)]
    if edit == "name":
        mine = [i for i in mine if "{name}" in steps[i].call]
    if not mine:
        return None
    if edit == "fewer rounds":
        return "round", [f"if {odd}:\n    break  {HERE}", *(_marked(step, step.call) for step in steps)]
    if edit == "more rounds":
        return "round", [_marked(step, step.call) for step in steps]
    chosen = draw.choice(mine)
    lines = [_marked(step, step.call, i == chosen) for i, step in enumerate(steps)]
    step = steps[chosen]
    if edit == "drop":
        lines[chosen] = _marked(step, f"if not ({odd}):\n{textwrap.indent(step.call, '    ')}")
    else:
        lines[chosen] = _marked(step, step.call.replace("{step}", "{step + 7 * int(" + odd + ")}"))
    return "key" if "{name}" in step.call else "collective", lines


def _marked(step: Step, call: str, is_marked: bool = True) -> str:
    """Return a step as a statement; its last line is one that a verdict may name."""
    call += f"  {HERE}" if is_marked else ""
    return call if step.where == "True" else f"if {step.where}:\n{textwrap.indent(call, '    ')}"


if __name__ == "__main__":
    measure(__doc__, program, HEAD, count_passed=False)
