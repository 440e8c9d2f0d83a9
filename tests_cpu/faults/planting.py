"""The parts of programs with a fault: the mark of each, a small model, and a training loop with a fault in it."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pytest_nsa

AT = 3  # the step in which a fault happens
NO_RANK = -1


@dataclass(frozen=True, slots=True)
class Program:
    """A program on ``n`` ranks. It takes ``rank`` as `culprit`; where ``rank`` is None, whether it is `faulty`."""

    n: int
    rank: int | None


def planted(n: int, *, rank: int | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator for a test on ``n`` ranks that takes the rank of its fault as ``culprit``, or whether it is ``faulty``."""

    def mark(function: Callable[..., None]) -> Callable[..., None]:
        function.program = Program(n, rank)  # type: ignore[attr-defined]
        return pytest_nsa.world_size(n)(function)

    return mark


@pytest.fixture(name="faulty")
def with_fault() -> bool:
    """Return that the program has its fault."""
    return True


@pytest.fixture(name="faulty")
def without_fault() -> bool:
    """Return that it has none: the test is the healthy twin."""
    return False


@pytest.fixture
def culprit(request: pytest.FixtureRequest, faulty: bool) -> int:
    """Return the rank that has the fault, or no rank."""
    return request.function.program.rank if faulty else NO_RANK


def programs_of(module: ModuleType) -> dict[str, Program]:
    """Return the programs of a module, by test, in the order of their lines."""
    return {name: f.program for name, f in vars(module).items() if hasattr(f, "program")}


def marked_lines(path: Path) -> frozenset[int]:
    """Return the lines of a module that end in ``# HERE``, and those of the same statement."""
    text = path.read_text(encoding="utf-8")
    marks = {n for n, line in enumerate(text.splitlines(), start=1) if line.endswith("# HERE")}
    lines = set(marks)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt) and not hasattr(node, "body"):  # a statement of several lines
            own = set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
            lines |= own if own & marks else set()
    return frozenset(lines)


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


class TwoHeads(nn.Module):
    """Two linear layers, of which the second is used where ``both`` is true."""

    def __init__(self, both: bool) -> None:
        super().__init__()
        self.used, self.other, self.both = nn.Linear(8, 1), nn.Linear(8, 1), both

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [B, 1] for x [B, 8]."""
        return self.used(x) + (self.other(x) if self.both else 0)


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
