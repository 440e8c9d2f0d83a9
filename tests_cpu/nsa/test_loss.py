"""The loss of a large vocabulary: by chunks of rows it is the plain one, and the logits are never all in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from nsa import build_model, load_config
from nsa.model.loss import linear_cross_entropy
from tests_cpu.plan.scenarios import ROOT

ROWS, DIM, VOCABULARY = (3, 17), 24, 41


class Largest(TorchDispatchMode):
    """Keeps the size of the largest tensor that an operator returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for one in found if isinstance(found, tuple | list) else [found]:
            if isinstance(one, torch.Tensor):
                self.numel = max(self.numel, one.numel())
        return found


def drawn(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hidden states [*ROWS, DIM], a weight [VOCABULARY, DIM], both with gradients, and targets [*ROWS]."""
    x = torch.randn(*ROWS, DIM, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCABULARY, DIM, dtype=dtype, requires_grad=True)
    return x, weight, torch.randint(0, VOCABULARY, ROWS)


def with_gradients(loss: torch.Tensor, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Return the loss and the gradients of three times the loss."""
    return [loss.detach(), *torch.autograd.grad(3 * loss, inputs)]


@pytest.mark.parametrize("rows", [1, 7, 50])
def test_chunks_give_the_loss_and_the_gradients_of_all_logits(rows: int) -> None:
    x, weight, targets = drawn()
    plain = F.cross_entropy((x @ weight.T).flatten(0, 1), targets.flatten())
    chunked = linear_cross_entropy(x, weight, targets, rows * 4 * VOCABULARY)
    # Sums of at most 51 products of numbers below 100.
    for one, other in zip(with_gradients(chunked, x, weight), with_gradients(plain, x, weight), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=51 * 100 * torch.finfo(torch.float64).eps)


def test_chunks_under_autocast_are_as_near_to_float64_as_all_logits() -> None:
    x, weight, targets = drawn()
    wanted = with_gradients(linear_cross_entropy(x, weight, targets), x, weight)
    narrow = [one.detach().float().requires_grad_() for one in (x, weight)]
    errors = []
    for at_once in (1 << 20, 5 * 4 * VOCABULARY):
        with torch.autocast("cpu", torch.bfloat16):
            loss = linear_cross_entropy(*narrow, targets, at_once)
        found = with_gradients(loss, *narrow)
        assert [one.dtype for one in found] == [torch.float32] * 3
        errors.append([(one - true).abs().max().item() for one, true in zip(found, wanted, strict=True)])
    assert all(chunked <= 2 * plain + 1e-3 for plain, chunked in zip(*errors, strict=True)), errors


def test_no_tensor_holds_more_logits_than_a_chunk() -> None:
    x, weight, targets = drawn()
    with Largest() as chunked:
        linear_cross_entropy(x, weight, targets, 4 * 4 * VOCABULARY).backward()
    with Largest() as plain:
        linear_cross_entropy(x, weight, targets).backward()
    assert plain.numel == 51 * VOCABULARY
    assert chunked.numel == max(x.numel(), weight.numel()) < plain.numel


def test_without_gradients_only_the_loss_is_computed() -> None:
    x, weight, targets = drawn()
    with torch.no_grad(), Largest() as seen:
        loss = linear_cross_entropy(x, weight, targets, 2 * 4 * VOCABULARY)
    torch.testing.assert_close(loss, linear_cross_entropy(x, weight, targets).detach())
    assert seen.numel == x.numel()  # neither all logits nor a gradient of the weight


def test_chunks_have_no_second_derivative() -> None:
    x, weight, targets = drawn()
    (grad,) = torch.autograd.grad(linear_cross_entropy(x, weight, targets, 4 * VOCABULARY), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        grad.sum().backward()


def test_a_model_that_is_given_targets_returns_the_loss_of_its_logits() -> None:
    model = build_model(load_config(ROOT / "configs" / "tiny_cpu.yaml"))
    tokens = torch.randint(0, 256, (2, 33))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    wanted = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model(inputs, targets=targets), wanted)
