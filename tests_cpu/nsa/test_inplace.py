"""Writes into what a recomputed region did not make are found, with the tensor and the operation; others are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from nsa import build_model, load_config
from nsa.trace.inplace import watched
from tests_cpu.plan.scenarios import ROOT


class Region(nn.Module):
    def __init__(self, body: Callable[[Region, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.norm, self.body = nn.Linear(4, 4), nn.BatchNorm1d(4), body
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x)


def scales_its_input(self: Region, x: torch.Tensor) -> torch.Tensor:
    x.data[:, 1:].mul_(2)  # a view of it, of which autograd knows nothing
    return self.linear(x)


def counts_in_a_buffer(self: Region, x: torch.Tensor) -> torch.Tensor:
    self.seen += x.detach().sum(0)
    return self.linear(x) * self.seen


def changes_a_weight(self: Region, x: torch.Tensor) -> torch.Tensor:
    self.linear.weight.data.clamp_(-0.01, 0.01)
    return self.linear(x)


def has_statistics(self: Region, x: torch.Tensor) -> torch.Tensor:
    return self.norm(self.linear(x))


def writes_into_its_own(self: Region, x: torch.Tensor) -> torch.Tensor:
    y = self.linear(x)
    y.add_(1)
    out = torch.empty_like(y)
    torch.add(y.detach(), 1, out=out)
    return out * y


@pytest.mark.parametrize(
    ("body", "operation", "tensor"),
    [
        (scales_its_input, "mul_", "input 0 of 1"),
        (counts_in_a_buffer, "add_", "1.seen"),
        (changes_a_weight, "clamp_", "1.linear.weight"),
        (has_statistics, "add_", "1.norm.num_batches_tracked"),
    ],
)
def test_a_write_is_named(body: Callable[[Region, torch.Tensor], torch.Tensor], operation: str, tensor: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Region(body))
    with watched(model, [model[1]]) as found:
        model(torch.randn(3, 4))
    assert (found[0].operation, found[0].tensor) == (operation, tensor)
    assert "test_inplace.py:" in found[0].where
    assert f" in {body.__name__}" in found[0].where
    assert "forward" not in vars(model[1])


def test_writes_into_tensors_of_its_own_are_none() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Region(writes_into_its_own))
    with watched(model, [model[1]]) as found:
        model(torch.randn(3, 4)).sum().backward()
    assert found == []


def test_a_block_in_two_places_is_watched_once() -> None:
    region = Region(has_statistics)
    model = nn.Sequential(region, region)
    with watched(model, list(model)) as found:
        model(torch.randn(3, 4))
    assert [write.tensor for write in found] == ["0.norm.num_batches_tracked"] * 2
    model.eval()
    with watched(model, list(model)) as found:
        model(torch.randn(3, 4))
    assert found == []


def test_the_model_s_blocks_write_into_nothing() -> None:
    config = load_config(ROOT / "configs" / "tiny_cpu.yaml", **{"model.n_layers": 2})
    model = build_model(config)
    with watched(model, list(model.blocks)) as found:
        model(torch.randint(0, 256, (1, 64))).sum().backward()
    assert found == []
