"""The parts of planted faults: the expectation of each, a small model, and a training loop with a fault in it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import pytest_nsa
from pytest_nsa.evidence.source import LOCATION

AT = 3  # the step in which a fault happens


@dataclass(frozen=True, kw_only=True, slots=True)
class Planted:
    """The verdict that a planted fault must get. ``where`` is a part of its location; ``reason`` a part of its reason.

    ``needs`` is a library without which it cannot be run live. With ``marked``, its line is one that ends in
    ``# HERE`` in the fault's module, or one of the same statement. ``miss``: the fact that is missing where the verdict is another
    one, and not certain: a known miss.
    """

    cause: str
    ranks: tuple[int, ...]
    where: str
    reason: str
    marked: bool = False
    needs: str = ""
    miss: str = ""

    def allows(self, where: str, module: ModuleType) -> bool:
        """Return whether a verdict's location is right."""
        if not self.marked:
            return self.where in where
        text = Path(module.__file__ or "").read_text(encoding="utf-8")
        marks = {n for n, line in enumerate(text.splitlines(), start=1) if line.endswith("# HERE")}
        lines = set(marks)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.stmt) and not hasattr(node, "body"):  # a statement of several lines
                own = set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
                lines |= own if own & marks else set()
        location = LOCATION.match(where)
        return (
            location is not None and Path(location["file"]).name == "test_planted.py" and int(location["line"]) in lines
        )


def planted(
    cause: str,
    ranks: Sequence[int],
    *,
    n: int = 2,
    where: str = "",
    reason: str = "",
    marked: bool = False,
    needs: str = "",
    miss: str = "",
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator for a test on ``n`` ranks with a fault, with the cause and ranks that its verdict must name."""

    def mark(function: Callable[..., None]) -> Callable[..., None]:
        expected = Planted(
            cause=cause, ranks=tuple(ranks), where=where, reason=reason, marked=marked, needs=needs, miss=miss
        )
        function.planted = expected  # type: ignore[attr-defined]
        return pytest_nsa.world_size(n)(function)

    return mark


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
