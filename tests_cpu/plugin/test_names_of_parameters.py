"""Names of parameters that torch gives by their indices: of the list that DDP was given, or in torch's own text."""

from __future__ import annotations

import pytest

from pytest_nsa.testing import run_example

SOURCE = """
from torch import nn

class Turns(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))
        self.chosen = 0

    def choose(self, n, *, freeze):
        self.chosen = n
        for at, layer in enumerate(self.layers):
            layer.requires_grad_(at == n or not freeze)

    def forward(self, x):
        return self.layers[self.chosen](x)

@world_size(2)
@pytest.mark.parametrize("freeze", [True, False])
def test_layers_by_turns(ddp, group, freeze):
    model = Turns()
    wrapped = ddp.wrap(model)
    for step in range(3):
        model.choose(2 - step, freeze=freeze)
        wrapped(torch.ones(2, 4)).sum().backward()

@world_size(2)
def test_two_models(ddp, group):
    other, model = ddp.wrap(nn.Linear(4, 4)), Turns()
    wrapped = ddp.wrap(model)
    for step in range(3):
        wrapped(torch.ones(2, 4)).sum().backward()
"""


@pytest.mark.parametrize("level", ["OFF", "INFO"])
def test_the_parameters_without_a_gradient_are_those_that_torch_counts(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", level)
    result = run_example(pytester, SOURCE)
    found = {name: (v.cause, v.ranks, v.module) for name, v in result.verdicts.items()}
    cause, ranks = "unused_parameters", (0, 1)
    assert found == {
        "test_layers_by_turns[True]": (cause, ranks, "layers.0"),
        "test_layers_by_turns[False]": (cause, ranks, "layers.0"),
        "test_two_models": (cause, ranks, "" if level == "OFF" else "layers.1"),
    }
