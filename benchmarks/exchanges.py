"""Generated programs of sends and receives in which one rank makes one call less, one more, or another one.

    python benchmarks/exchanges.py --seed 20 --programs 120 --json benchmarks/results/exchanges.json

A program exchanges messages in one of nine patterns, on 2 to 6 ranks, in one round or several, with or without a collective.
One rank leaves out a send, a receive or the collective, makes one twice, addresses another rank, uses another tag, makes two calls
in the other order, or makes a round more or less.
"""

from __future__ import annotations

import random
import textwrap
from collections.abc import Callable
from dataclasses import dataclass

from generated import HERE, Program, measure

HEAD = """\
import torch
import torch.distributed as dist
from pytest_nsa import world_size

ODD = set()


def is_odd(step):
    return (dist.get_rank(), step) in ODD


def give(x, other):
    dist.send(x, other)


def take(x, other):
    dist.recv(x, other)
    return x


"""
EDITS = ("drop", "drop", "drop", "twice", "twice", "peer", "tag", "swap", "fewer rounds", "more rounds")


@dataclass(frozen=True, slots=True)
class Step:
    """What ranks do next: those for which ``where`` holds make ``call``, with ``{peer}``, and ``{tag}`` before the bracket.

    ``inner``: the call is in a loop over the ranks of this text, as ``other``.
    """

    call: str
    peer: str = ""
    where: str = "True"
    inner: str = ""

    def is_of(self, rank: int, n: int) -> bool:
        return bool(eval(self.where, {"rank": rank, "n": n}))  # of this file's own texts

    def peers(self, rank: int, n: int) -> list[int]:
        names = {"rank": rank, "n": n}
        others = eval(self.inner, names) if self.inner else [0]
        return [eval(self.peer, names | {"other": other}) for other in others] if self.peer else []

    def text(self, change: Callable[[str], str] = lambda call: call) -> str:
        """Return the step as a statement; ``change`` edits its call."""
        call = change(self.call.replace("{peer}", self.peer))
        if self.inner:
            call = f"for other in {self.inner}:\n{textwrap.indent(call, '    ')}"
        return call if self.where == "True" else f"if {self.where}:\n{textwrap.indent(call, '    ')}"


def _send(peer: str, where: str = "True", inner: str = "") -> Step:
    return Step("dist.send(x, {peer}{tag})", peer, where, inner)


def _receive(peer: str, where: str = "True", inner: str = "") -> Step:
    return Step("dist.recv(y, {peer}{tag})", peer, where, inner)


NEXT, BEFORE = "(rank + 1) % n", "(rank - 1) % n"
PATTERNS: dict[str, tuple[Step, ...]] = {
    "ring": (
        Step("work = dist.isend(x, {peer}{tag})", NEXT),
        _receive(BEFORE),
        Step("work.wait()"),
    ),
    "turns": (
        _send(NEXT, "rank == 0"), _receive(BEFORE, "rank > 0"), _send(NEXT, "rank > 0"), _receive(BEFORE, "rank == 0"),
    ),
    "pipeline": (
        _receive("rank - 1", "rank > 0"), _send("rank + 1", "rank < n - 1"),
        _receive("rank + 1", "rank < n - 1"), _send("rank - 1", "rank > 0"),
    ),
    "one way": (_receive("rank - 1", "rank > 0"), _send("rank + 1", "rank < n - 1")),
    "server": (
        _send("0", "rank > 0"), _receive("other", "rank == 0", "range(1, n)"),
        _send("other", "rank == 0", "range(1, n)"), _receive("0", "rank > 0"),
    ),
    "any": (
        _send("0", "rank > 0"), Step("dist.recv(y{tag})", "", "rank == 0", "range(1, n)"),
        Step("dist.broadcast(x, 0)"),
    ),
    "helpers": (
        Step("give(x, {peer})", "other", "rank == 0", "range(1, n)"), Step("y = take(y, {peer})", "0", "rank > 0"),
        Step("give(x, {peer})", "0", "rank > 0"), Step("y = take(y, {peer})", "other", "rank == 0", "range(1, n)"),
    ),
    "pairs": (
        _send("rank + 1", "rank % 2 == 0 and rank + 1 < n"), _receive("rank - 1", "rank % 2 == 1"),
        _send("rank - 1", "rank % 2 == 1"), _receive("rank + 1", "rank % 2 == 0 and rank + 1 < n"),
    ),
    "batch": (
        Step(
            "for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, {peer}), dist.P2POp(dist.irecv, y, (rank - 1) % n)]):\n"
            "    work.wait()",
            NEXT,
        ),
    ),
}  # fmt: skip
COLLECTIVES = ("dist.all_reduce(total)", "dist.barrier()", "dist.broadcast(total, 0)")


def program(number: int, draw: random.Random) -> Program:
    """Return a program in which one rank departs from the pattern; in a few, all ranks wait for each other in a circle."""
    n, rounds = draw.choice([2, 2, 3, 4, 5, 6]), draw.choice([1, 4, 4])
    at, k = draw.randrange(rounds), draw.randrange(n)
    name = f"test_{number:03d}"
    if draw.random() < 0.06:
        return _circle(name, n, draw)
    while True:
        pattern, edit = draw.choice(list(PATTERNS)), draw.choice(EDITS)
        steps = list(PATTERNS[pattern])
        if draw.random() < 0.6:
            steps.insert(draw.randint(0, 1) * len(steps), Step(draw.choice(COLLECTIVES)))
        is_tagged = edit == "tag" or draw.random() < 0.2
        odd = draw.choice(("is_odd(step)", "is_odd(step)", f"rank == {k} and step == {at}", "float(x[0]) < 0"))
        body = _edited(steps, edit, k, n, odd, draw)
        if body is not None and not (edit.endswith("rounds") and rounds == 1):
            break
    what, lines = body
    tag = ", tag=step" if is_tagged else ""
    lines = [line.replace("{tag}", tag) for line in lines]
    is_more = edit == "more rounds"
    inner = ["x = torch.ones(4)", "x *= -1 if is_odd(step) else 1", *lines]
    loop = [f"for step in range({rounds}{' + is_odd(-1)' if is_more else ''}):"]
    loop += [textwrap.indent(line, "    ") for line in inner]
    setup = [
        f"ODD.add(({k}, {-1 if is_more else at}))", "rank, n = dist.get_rank(), dist.get_world_size()",
        "y, total = torch.empty(4), torch.ones(3)",
    ]  # fmt: skip
    end = ["dist.barrier()"] if draw.random() < 0.6 else []
    text = [
        f"@world_size({n})",
        f"def {name}(group):",
        *(textwrap.indent(t, "    ") for t in [*setup, *loop, *end]),
        "",
    ]
    of_a_collective = "skipped_collective" if edit in ("drop", "fewer rounds") else "extra_collective"
    # Of a round, either may be what the ranks wait in.
    causes = {"collective": (of_a_collective,), "round": ("p2p_unmatched", of_a_collective)}.get(
        what, ("p2p_unmatched",)
    )
    kind = f"{pattern}, {edit} {what}, {'two ranks' if n == 2 else 'more'}"
    return Program(name=name, text="\n".join(text), kind=kind, causes=causes, ranks=[k])


def _edited(
    steps: list[Step], edit: str, k: int, n: int, odd: str, draw: random.Random
) -> tuple[str, list[str]] | None:
    """Return what is edited, and the lines of a round in which rank ``k`` makes the ``edit`` where ``odd``; None for no such."""
    lines = [step.text() for step in steps]
    if edit == "fewer rounds":
        return "round", [f"if {odd}:\n    break  {HERE}", *lines]
    if edit == "more rounds":
        return "round", [f"{line}  {HERE}" for line in lines]
    mine = [
        i
        for i, step in enumerate(steps)
        if step.is_of(k, n) and (step.call.startswith(("dist.", "give", "y =", "work = ")))
    ]
    if edit in ("peer", "tag"):
        mine = [i for i in mine if steps[i].peer and "{tag}" in steps[i].call]
        if edit == "peer":
            mine = [i for i in mine if any((p + 1) % n != k for p in steps[i].peers(k, n)) and n > 2]
    if edit == "swap":
        mine = [i for i in mine if i + 1 in mine]
    mine = [i for i in mine if not (steps[i].call.startswith("work = ") and edit != "peer")]
    if not mine:
        return None
    at = draw.choice(mine)
    step = steps[at]
    which = odd
    if step.inner:
        others = list(eval(step.inner, {"n": n}))
        if not others:
            return None
        which = f"{odd} and other == {draw.choice(others)}" if "other" in step.peer or draw.random() < 0.9 else odd
    changes: dict[str, Callable[[str], str]] = {
        "drop": lambda call: f"if not ({which}):\n    {call}  {HERE}",
        "twice": lambda call: f"{call}  {HERE}\nif {which}:\n    {call}  {HERE}",
        "peer": lambda call: call.replace(step.peer, f"({step.peer} + int({which})) % n") + f"  {HERE}",
        "tag": lambda call: call.replace("{tag}", f", tag=step + 7 * int({which})") + f"  {HERE}",
    }
    if edit == "swap":
        one, other = lines[at], lines[at + 1]
        both = "\n".join(textwrap.indent(t, "    ") for t in (other, one))
        usual = "\n".join(textwrap.indent(t, "    ") for t in (one, other))
        lines[at : at + 2] = [f"if {odd}:\n{both}  {HERE}\nelse:\n{usual}"]
        return "calls", lines
    if "\n" in step.call:
        return None
    lines[at] = step.text(changes[edit])
    return _kind_of(step), lines


def _kind_of(step: Step) -> str:
    """Return 'send', 'receive' or 'collective'."""
    if "send" in step.call or "give" in step.call:
        return "send"
    return "receive" if step.peer or "recv" in step.call else "collective"


def _circle(name: str, n: int, draw: random.Random) -> Program:
    """Return a program in which all ranks send first, or all receive first, around a ring."""
    calls = ["dist.send(torch.ones(4), (rank + 1) % n)", "dist.recv(torch.empty(4), (rank - 1) % n)"]
    one, other = calls if draw.random() < 0.5 else calls[::-1]
    lines = ["rank, n = dist.get_rank(), dist.get_world_size()", "dist.barrier()", f"{one}  {HERE}", other]
    text = [f"@world_size({n})", f"def {name}(group):", *(f"    {line}" for line in lines), ""]
    return Program(name=name, text="\n".join(text), kind="circle", causes=("p2p_unmatched",), ranks=list(range(n)))


if __name__ == "__main__":
    measure(__doc__, program, HEAD, count_passed=False)
