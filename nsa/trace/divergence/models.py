"""What is compared of a model: which tensors, under which number of the model, among which ranks."""

import functools
import weakref
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.algorithms import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from nsa.trace.divergence.training_state import made_equal
from nsa.trace.gradients import is_flattened
from nsa.trace.names import plain_name


@dataclass(frozen=True, slots=True)
class Seen:
    """The tensors of a model that are compared, with the step, the user's line, and the ranks."""

    step: int
    site: str
    model: int
    names: list[str]
    tensors: list[torch.Tensor | None]
    ranks: list[int]


class Numbers:
    """The numbers of models. A model that is called past its wrapper has the wrapper's number. After a `Join` each model gets a new
    number, as each rank has made as many steps in it as it had data.
    """

    def __init__(self) -> None:
        self.joins, self._joins_before = 0, _joins_made
        self._count = 0  # of the models so far, including freed ones
        self._numbers: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()

    def has_joined(self) -> bool:
        """Return whether a `Join` has ended since the last call; if so, forget all numbers."""
        joins = _joins_made - self._joins_before
        if self.joins == joins:
            return False
        self.joins = joins
        self._numbers.clear()
        return True

    def of(self, root: torch.nn.Module) -> int:
        """Return the number of a model."""
        root = find_wrapper(root) or root
        if root not in self._numbers:
            self._count += 1
            self._numbers[root] = self._count
        return self._numbers[root]


def norms_of(tensors: list[torch.Tensor]) -> list[float]:
    """Return the L2 norms of tensors."""
    return torch.stack([n.float() for n in torch._foreach_norm(tensors)]).cpu().tolist() if tensors else []


def norms_at_start(model: torch.nn.Module) -> list[float]:
    """Return the norms of a model's parameters. Detached, so that the running forward saves no additional tensors."""
    plain = (p for p in model.parameters() if type(p) is torch.nn.Parameter and not p.is_meta and not p.is_sparse)
    return norms_of([p.detach() for p in plain])


def compared(
    module: torch.nn.Module, ignored: Collection[str], *, with_frozen: bool
) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the names and parameters of a model that are compared: first the trained ones, so that a name has one index among
    gradients and among parameters, then the frozen ones that are floating point, as integers have no norm.
    """
    named = [(plain_name(n), p) for n, p in module.named_parameters() if n not in ignored]
    frozen = [(n, p) for n, p in named if with_frozen and not p.requires_grad and p.is_floating_point()]
    return [(n, p) for n, p in named if p.requires_grad] + frozen


def is_plain(root: torch.nn.Module) -> bool:
    """Return whether each parameter of a model is whole on this rank, not a share of one."""
    return all(type(p) is torch.nn.Parameter and not p.is_sparse and not is_flattened(p) for p in root.parameters())


def updates(optimizer: Optimizer, root: torch.nn.Module) -> bool:
    """Return whether an optimizer has a parameter of a model."""
    own = {id(p) for p in root.parameters()}
    return any(id(p) in own for group in optimizer.param_groups for p in group["params"])


def keeps_equal(ddp: DistributedDataParallel) -> bool:
    """Return whether DDP keeps replicas equal: not under no_sync, nor with torch's hook for local SGD, which uses subgroups."""
    reduces = getattr(ddp, "require_forward_param_sync", ddp.require_backward_grad_sync)  # as its last forward found it
    return reduces and not averages_in_subgroups(ddp)


def averages_in_subgroups(ddp: DistributedDataParallel) -> bool:
    hook = getattr(getattr(ddp, "_nsa_bucket_hook", None), "user_hook", None)
    return getattr(hook, "__name__", "") == "post_localSGD_hook"


def may_average(tensors: Any, parameters: list[torch.Tensor | None]) -> bool:
    """Return whether an all-reduce has a tensor as large as the largest parameter or larger: it may hold parameters."""
    largest = max((p.numel() for p in parameters if p is not None), default=0)
    reduced = tensors if isinstance(tensors, list | tuple) else [tensors]
    return any(isinstance(t, torch.Tensor) and t.numel() >= largest for t in reduced)


_wrappers: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[DistributedDataParallel]] = (
    weakref.WeakKeyDictionary()
)
_joins_made = 0  # in this process


def remember_wrapper(ddp: DistributedDataParallel) -> None:
    """Record that DDP has wrapped a module, even if it is never called through the wrapper."""
    _wrappers[ddp.module] = weakref.ref(ddp)
    made_equal(ddp.module)


def find_wrapper(module: torch.nn.Module) -> DistributedDataParallel | None:
    found = _wrappers.get(module)
    return found() if found is not None else None


def count_joins() -> None:
    """Count from now on how many joins have ended. Once per process."""
    leave = Join.__exit__

    @functools.wraps(leave)
    def leaving(join: Join, *error: Any) -> None:
        __tracebackhide__ = True
        global _joins_made
        leave(join, *error)
        _joins_made += 1

    Join.__exit__ = leaving
