"""Real faults, so that a user can see the plan name them: ``make plan FAULT=sel_backward_deadlock``."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from nsa.training.trainer import Trainer

CULPRIT = 1
never_released = threading.Lock()


def settings(fault: str | None, parallel: str, *, static_graph: bool) -> dict[str, Any]:
    """Return what a fault changes in a scenario's configuration."""
    if fault != "gc_reentrant" or parallel != "ddp":
        return {}
    # Under static_graph DDP finds unused parameters by itself.
    return {
        "train.gc_reentrant": True,
        "parallel.find_unused_parameters": not static_graph,
    }


def plant(fault: str | None, trainer: Trainer) -> None:
    """Plant the fault in this process, when it is the culprit of several ranks."""
    if fault is None or trainer.ranks.world_size == 1 or trainer.ranks.rank != CULPRIT:
        return
    if fault == "sel_backward_deadlock":
        _deadlock_in_selection()
    elif fault == "rank1_skips_allreduce":
        _skip_all_reduce()
    elif fault == "rank1_killed":
        _killed_in_backward(trainer.module)


class WaitInBackward(torch.autograd.Function):
    """Identity whose backward waits for a lock that no thread will release."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        with never_released:
            return gradient


def _deadlock_in_selection() -> None:
    """Plant the deadlock in the branch by itself, and where a CPU attends to all three branches at once."""
    from nsa.kernels import backends
    from nsa.kernels.ops import Operators

    never_released.acquire()
    selected, attend = Operators.selected, backends.attend_on_cpu
    Operators.selected = lambda *args, **kwargs: WaitInBackward.apply(selected(*args, **kwargs))
    backends.attend_on_cpu = lambda q, cmp, sel, *args, **kwargs: attend(
        q, cmp, tuple(WaitInBackward.apply(x) for x in sel), *args, **kwargs
    )


def _skip_all_reduce() -> None:
    """Make this rank keep its own loss instead of averaging it with the others'."""
    all_reduce = dist.all_reduce
    dist.all_reduce = lambda tensor, *args, **kwargs: (
        None if tensor.numel() < 4 else all_reduce(tensor, *args, **kwargs)
    )


def _killed_in_backward(module: torch.nn.Module) -> None:
    """Plant a SIGKILL in the middle of backward, as the kernel's OOM killer would send it."""

    def kill(gradient: torch.Tensor) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    module.get_parameter("blocks.6.attn.out.weight").register_hook(kill)
