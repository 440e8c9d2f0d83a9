"""The parts of planted faults: the expectation of each, a small model, and a training loop with a fault in it."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pytest_nsa
from pytest_nsa.evidence.source import LOCATION

AT = 3  # the step in which a fault happens
# What one edit did to a program that is right on every rank.
FAMILIES = {
    "skip": "a call, message, key or batch is left out",
    "extra": "a call or message is added",
    "swap": "two calls or messages change places",
    "mismatch": "a call has another operation, size, type or tag",
    "wrong_peer": "a message goes to, or is expected from, another rank",
    "dropped": "the Work of a message is not kept",
    "key": "a key of a store has another name",
    "group": "a group is not made, or made otherwise",
    "meeting": "the first group does not form: address, port, rank, size",
    "branch": "the forward takes another branch",
    "hook": "a hook has a collective",
    "unused": "a parameter gets no gradient",
    "autograd": "the graph or its recomputation is not what DDP expects",
    "numbers": "values, gradients or replicas become wrong",
    "raise": "an exception",
    "exit": "the process ends",
    "crash": "a signal ends the process",
    "stop": "a signal stops the process",
    "memory": "memory runs out",
    "lock": "a lock, queue or thread is waited for",
    "loader": "a data loader's worker stalls or dies",
    "sleep": "a sleep or a poll",
    "io": "a file, pipe or socket is waited for",
    "child": "a child process is waited for",
    "endless": "a loop does not end",
    "busy": "native code or a compiler runs, or keeps the GIL",
    "slow": "a step takes longer",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Planted:
    """The verdict that a planted fault must get. ``where`` is a part of its location; ``reason`` a part of its reason.

    ``n`` is the number of ranks. ``family`` is the kind of edit (`FAMILIES`); ``origin``, where the program comes from: an issue, a
    set and its date, a seed.
    ``needs`` is a library without which it cannot be run live. With ``marked``, its line is one that ends in
    ``# HERE`` in the fault's module, or one of the same statement. ``miss``: the fact that is missing where the verdict is another
    one, and not certain, or its line: a known miss. ``arguments`` are those of the test besides its fixtures.
    """

    cause: str
    ranks: tuple[int, ...]
    n: int
    where: str
    reason: str
    family: str
    origin: str
    marked: bool = False
    needs: str = ""
    miss: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.family not in FAMILIES or not self.origin:
            raise ValueError(
                f"planted(family={self.family!r}, origin={self.origin!r}): a family of {', '.join(FAMILIES)}, and an origin"
            )

    def allows(self, where: str, module: ModuleType) -> bool:
        """Return whether a verdict's location is right."""
        if not self.marked:
            return self.where in where
        location = LOCATION.match(where)
        return (
            location is not None
            and Path(location["file"]).name == "test_planted.py"
            and int(location["line"]) in _marked_lines(Path(module.__file__ or ""))
        )


@functools.cache
def _marked_lines(path: Path) -> frozenset[int]:
    """Return the lines of a module that end in ``# HERE``, and those of the same statement."""
    text = path.read_text(encoding="utf-8")
    marks = {n for n, line in enumerate(text.splitlines(), start=1) if line.endswith("# HERE")}
    lines = set(marks)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt) and not hasattr(node, "body"):  # a statement of several lines
            own = set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
            lines |= own if own & marks else set()
    return frozenset(lines)


def planted(
    cause: str,
    ranks: Sequence[int],
    *,
    family: str,
    origin: str,
    n: int = 2,
    where: str = "",
    reason: str = "",
    marked: bool = False,
    needs: str = "",
    miss: str = "",
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator for a test on ``n`` ranks with a fault, with the cause and ranks that its verdict must name.

    Raise ValueError for a family that is not in `FAMILIES`, or an empty origin.
    """
    expected = Planted(
        cause=cause, ranks=tuple(ranks), n=n, where=where, reason=reason, family=family, origin=origin, marked=marked,
        needs=needs, miss=miss,
    )  # fmt: skip

    def mark(function: Callable[..., None]) -> Callable[..., None]:
        function.planted = {"": expected}  # type: ignore[attr-defined]
        return pytest_nsa.world_size(n)(function)

    return mark


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One way in which a fault is planted: the number of ranks, a part of the reason, and the arguments of the test."""

    n: int
    reason: str
    miss: str = ""
    arguments: Mapping[str, Any]


def case(culprit: int, *, n: int = 2, reason: str = "", miss: str = "", **arguments: Any) -> Case:
    """Return a case of `planted_cases`: the test receives ``culprit``, the rank with the fault, and ``arguments``."""
    return Case(n=n, reason=reason, miss=miss, arguments={"culprit": culprit, **arguments})


def planted_cases(
    cause: str,
    *,
    cases: Mapping[str, Case],
    family: str,
    origin: str,
    where: str = "",
    marked: bool = False,
    miss: str = "",
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator for one fault that is planted in several ways, each a test of its own: `test_fault[CASE]`.

    Raise ValueError as `planted` does.
    """
    expected = {
        f"[{name}]": Planted(
            cause=cause, ranks=(of.arguments["culprit"],), n=of.n, where=where, reason=of.reason, family=family, origin=origin,
            marked=marked, miss=of.miss or miss, arguments=of.arguments,
        )
        for name, of in cases.items()
    }  # fmt: skip

    def mark(function: Callable[..., None]) -> Callable[..., None]:
        names = list(next(iter(cases.values())).arguments)
        rows = [
            pytest.param(*of.arguments.values(), id=key, marks=pytest_nsa.world_size(of.n)) for key, of in cases.items()
        ]
        function.planted = expected  # type: ignore[attr-defined]
        return pytest.mark.parametrize(names, rows)(function)

    return mark


def faults_of(module: ModuleType) -> dict[str, Planted]:
    """Return the expected verdicts of a module's faults, by test, in the order of their lines."""
    functions = [(name, f.planted) for name, f in vars(module).items() if hasattr(f, "planted")]
    return {f"{name}{suffix}": fault for name, cases in functions for suffix, fault in cases.items()}


class Block(nn.Module):
    """A small block: three branches and their gate. Its forward calls ``fault``, its backward ``in_backward``."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.cmp, self.sel, self.win = (nn.Linear(dim, dim) for _ in range(3))
        self.gate = nn.Linear(dim, 3)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.fault: Callable[[], Any] = lambda: None
        self.in_backward: Callable[[], Any] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [B, dim] for x [B, dim]."""
        self.fault()
        gates = torch.sigmoid(self.gate(x)).unbind(-1)
        out = sum(g[:, None] * m(x) for g, m in zip(gates, (self.cmp, self.sel, self.win), strict=True))
        assert isinstance(out, torch.Tensor)
        if self.in_backward is not None:
            function = self.in_backward
            out.register_hook(lambda gradient: function())
        return x + self.mlp(out)


class Net(nn.Module):
    """An embedding of a batch, ``blocks`` blocks, a head."""

    def __init__(self, dim: int = 16, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(8, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(blocks))
        self.head = nn.Linear(dim, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [B, 1] for x [B, 8]."""
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(rank: int, step: int) -> torch.Tensor:
    """Return a batch [4, 8], a different one per rank and step."""
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * rank + step))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the loss, a scalar."""
    return F.mse_loss(model(x), torch.ones(len(x), 1))


def train(
    model: nn.Module, rank: int, *, steps: int = 6, culprit: int = -1, before: Callable[[], Any] = lambda: None
) -> None:
    """Run ``steps`` steps of SGD; on rank ``culprit``, call ``before()`` before step AT."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        if rank == culprit and step == AT:
            before()
        optimizer.zero_grad()
        loss_of(model, batch(rank, step)).backward()
        optimizer.step()


def net(seed: int = 0) -> Net:
    """Return a model that is the same on all ranks."""
    torch.manual_seed(seed)
    return Net()
