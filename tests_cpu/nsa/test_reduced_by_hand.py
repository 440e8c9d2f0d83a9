"""Which all-reduces are of a model's gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from nsa.trace.divergence.reduced_by_hand import HandReduction


class Group:
    """As much of a process group as is asked for."""

    def size(self) -> int:
        return 2


def trained() -> nn.Linear:
    model = nn.Linear(8, 4)
    model(torch.randn(3, 8)).square().sum().backward()
    return model


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    ("reduced", "is_found"),
    [
        (lambda model: [torch.cat([g.reshape(-1) for g in gradients(model)])], True),
        (lambda model: [torch.cat([g.reshape(-1) for g in gradients(model)]) / 2], True),
        (gradients, True),
        (lambda model: gradients(model)[:1], False),
        (lambda model: [torch.cat([p.detach().reshape(-1) for p in model.parameters()])], False),
        (lambda model: [torch.ones(36)], False),
        (lambda model: [torch.empty(0)], False),
    ],
    ids=["in one", "in one, divided", "in place", "a part", "parameters", "others of their number", "nothing"],
)
def test_gradients_are_known_by_place_or_by_number_and_norm(
    reduced: Callable[[nn.Module], list[torch.Tensor]], is_found: bool
) -> None:
    model, group, found = trained(), Group(), HandReduction()
    for tensor in reduced(model):
        found.reduced(group, [tensor], [model])
    assert (found.group_of(model) is group) is is_found
    found.forget()
    assert found.group_of(model) is None


def test_an_all_reduce_of_nothing_before_a_backward_is_let_through() -> None:
    found, model = HandReduction(), nn.Linear(8, 4)
    found.reduced(Group(), [torch.empty(0)], [model])
    assert found.group_of(model) is None
