"""Small models, their batches and their steps: for programs that make replicas differ, and other trainings."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


def small(seed: int = 11) -> nn.Sequential:
    """Return a classifier of [B, 6] into three classes."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def labelled_batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs [6, 6] and classes [6] for `small`, others per rank and step."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(6, 6, generator=generator), torch.randint(0, 3, (6,), generator=generator)


def backward(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> float:
    """Run forward and backward on a `labelled_batch`, without an update; return the loss."""
    x, y = labelled_batch(rank, step)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss.item()


def relu_net() -> nn.Sequential:
    """Return a model of [B, 6] with a ReLU."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))


def two_outputs() -> nn.Sequential:
    """Return a model of [B, 6] with a tanh and two outputs."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def inputs(rank: int, step: int) -> torch.Tensor:
    """Return inputs [4, 6], others per rank and step."""
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * rank + step))


def train_on_noise(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int, first: int = 0) -> None:
    """Run ``steps`` steps on noise [4, 6], from the step ``first`` on."""
    for step in range(first, first + steps):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(50 * rank + step))
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()


def small_model(width: int = 16) -> nn.Sequential:
    """Return a regression of [B, 8] to [B, 4]."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 4))


def batch_of(rank: int, step: int, rows: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs [rows, 8] and targets [rows, 4] for `small_model`, others per rank and step."""
    generator = torch.Generator().manual_seed(10_000 * (rank + 1) + step)
    return torch.randn(rows, 8, generator=generator), torch.randn(rows, 4, generator=generator)
