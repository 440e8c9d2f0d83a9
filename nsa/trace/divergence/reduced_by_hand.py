"""Finds that a program reduces its model's gradients by hand, without DDP: its parameters must then be equal on all ranks, too.

Known by the gradients themselves: each is all-reduced where it lies, or all of them in one tensor of their size and norm. What
averages parameters (local SGD), statistics, or the gradients of some parameters alone is none of it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from typing import Any

import torch

SMALLEST = 16  # numbers in all: the loss of a model with fewer may have as many
_CLOSE = 1e-3  # relative, of a norm: the sum of the squares in another order


class HandReduction:
    """Which gradients were all-reduced since the model was last called, and in which group."""

    def __init__(self) -> None:
        self._whole: weakref.WeakKeyDictionary[torch.nn.Module, Any] = weakref.WeakKeyDictionary()
        self._in_place: dict[int, Any] = {}  # by the address of a gradient, its group
        self._ends: weakref.WeakKeyDictionary[torch.nn.Module, tuple[torch.nn.Parameter, ...]] = (
            weakref.WeakKeyDictionary()
        )

    def forget(self) -> None:
        """A model is called: what is reduced from now on belongs to its next update."""
        self._whole.clear()
        self._in_place.clear()

    def reduced(self, group: Any, tensors: Iterable[Any], roots: Iterable[torch.nn.Module]) -> None:
        """Take note of an all-reduce of ``tensors``, before it is made, among the ranks of ``group``."""
        numbers = [t for t in tensors if isinstance(t, torch.Tensor) and t.is_floating_point() and not t.is_sparse]
        self._in_place.update((tensor.data_ptr(), group) for tensor in numbers)
        for root in roots:
            gradients = gradients_of(root)
            size = sum(g.numel() for g in gradients)
            if size >= SMALLEST and any(
                t.numel() == size and _has_norm_of(t, gradients, group.size()) for t in numbers
            ):
                self._whole[root] = group

    def may_be_whole(self, root: torch.nn.Module, tensors: Iterable[Any]) -> bool:
        """Return whether, with the all-reduce of ``tensors``, all gradients of a model may have been reduced: as a rule with that
        of the first or the last of them. To look after each would cost their number squared.
        """
        if root in self._whole:
            return True
        if root not in self._ends:
            self._ends[root] = _ends_of(root)
        ends = [p.grad.data_ptr() for p in self._ends[root] if p.grad is not None]
        return any(isinstance(t, torch.Tensor) and not t.is_sparse and t.data_ptr() in ends for t in tensors)

    def group_of(self, root: torch.nn.Module) -> Any:
        """Return the group in which all gradients of a model were reduced; None where they were not."""
        gradients = gradients_of(root)
        if sum(g.numel() for g in gradients) < SMALLEST:
            return None
        if root in self._whole:
            return self._whole[root]
        groups = [self._in_place.get(g.data_ptr()) for g in gradients]
        return groups[0] if all(g is not None and g is groups[0] for g in groups) else None


def _ends_of(root: torch.nn.Module) -> tuple[torch.nn.Parameter, ...]:
    """Return the first and the last parameter of a model that are trained."""
    trained = [p for p in root.parameters() if p.requires_grad]
    return (trained[0], trained[-1]) if trained else ()


def gradients_of(root: torch.nn.Module) -> list[torch.Tensor]:
    """Return the gradients that a model has; [] where some are of tensors that are shared out among ranks, or sparse."""
    found = [p.grad for p in root.parameters() if p.requires_grad and p.grad is not None]
    return [] if any(hasattr(g, "placements") or g.is_sparse for g in found) else found


def _has_norm_of(tensor: torch.Tensor, gradients: list[torch.Tensor], size: int) -> bool:
    """Return whether a tensor has the norm of gradients, or of these divided by the number of ranks."""
    norms = torch._foreach_norm(gradients)
    expected, found = (float(torch.stack([n.float() for n in ns]).norm()) for ns in (norms, [tensor.norm()]))
    return any(math.isclose(found * factor, expected, rel_tol=_CLOSE) for factor in (1.0, float(size)))
