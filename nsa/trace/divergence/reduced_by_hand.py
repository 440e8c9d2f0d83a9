"""Detect that a program reduces its model's gradients by hand, without DDP: its parameters must then be equal on all ranks, too.

Detected by the gradients: each is all-reduced in place, or all of them in one tensor of their size and norm. Averages of parameters
(local SGD), of statistics, or of the gradients of only some parameters do not count.
"""

import math
import weakref
from collections.abc import Iterable
from typing import Any

import torch

SMALLEST = 16  # numbers in total: with fewer, a loss may have the same size as the gradients
_CLOSE = 1e-3  # relative difference of a norm: the squares may be summed in another order


class HandReduction:
    """Which gradients were all-reduced since the model was last called, and in which group."""

    def __init__(self) -> None:
        self._whole: weakref.WeakKeyDictionary[torch.nn.Module, Any] = weakref.WeakKeyDictionary()
        self._in_place: dict[int, Any] = {}  # by the address of a gradient, its group
        self._ends: weakref.WeakKeyDictionary[torch.nn.Module, tuple[torch.nn.Parameter, ...]] = (
            weakref.WeakKeyDictionary()
        )

    def forget(self) -> None:
        """Reset when a model is called: later reductions belong to its next update."""
        self._whole.clear()
        self._in_place.clear()

    def reduced(self, group: Any, tensors: Iterable[Any], roots: Iterable[torch.nn.Module]) -> None:
        """Note an all-reduce of ``tensors`` among the ranks of ``group``, before it starts."""
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
        """Return whether the all-reduce of ``tensors`` may complete the reduction of all gradients of a model: usually it is that
        of the first or the last parameter. A check after each all-reduce would cost the square of their number.
        """
        if root in self._whole:
            return True
        if root not in self._ends:
            trained = [p for p in root.parameters() if p.requires_grad]
            self._ends[root] = (*trained[:1], *trained[-1:])
        ends = [p.grad.data_ptr() for p in self._ends[root] if p.grad is not None]
        return any(isinstance(t, torch.Tensor) and not t.is_sparse and t.data_ptr() in ends for t in tensors)

    def group_of(self, root: torch.nn.Module) -> Any:
        """Return the group in which all gradients of a model were reduced; None if they were not."""
        gradients = gradients_of(root)
        if sum(g.numel() for g in gradients) < SMALLEST:
            return None
        if root in self._whole:
            return self._whole[root]
        groups = [self._in_place.get(g.data_ptr()) for g in gradients]
        return groups[0] if all(g is not None and g is groups[0] for g in groups) else None


def gradients_of(root: torch.nn.Module) -> list[torch.Tensor]:
    """Return the gradients of a model; [] if some are sharded over ranks, or sparse."""
    found = [p.grad for p in root.parameters() if p.requires_grad and p.grad is not None]
    return [] if any(hasattr(g, "placements") or g.is_sparse for g in found) else found


def _has_norm_of(tensor: torch.Tensor, gradients: list[torch.Tensor], size: int) -> bool:
    """Return whether a tensor has the norm of gradients, or of the gradients divided by the number of ranks."""
    norms = torch._foreach_norm(gradients)
    expected, found = (float(torch.stack([n.float() for n in ns]).norm()) for ns in (norms, [tensor.norm()]))
    return any(math.isclose(found * factor, expected, rel_tol=_CLOSE) for factor in (1.0, float(size)))
