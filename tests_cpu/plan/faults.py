"""Real faults, so that a user can see the plan name them: ``make plan FAULT=sel_backward_deadlock``."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from nsa.training.trainer import Trainer

never_released = threading.Lock()


def settings(fault: str | None, parallel: str, *, static_graph: bool) -> dict[str, Any]:
    """Return what a fault changes in a scenario's configuration."""
    if fault != "gc_reentrant" or parallel != "ddp":
        return {}
    # Under static_graph DDP finds unused parameters by itself.
    return {
        "train.gc_reentrant": True,
        "train.gc_keep_selection": False,  # which the reentrant form cannot
        "parallel.find_unused_parameters": not static_graph,
    }


def plant(fault: str | None, trainer: Trainer, culprit: int) -> None:
    """Plant the fault in this process: in every one, or where there are several ranks in the rank ``culprit``."""
    ranks = trainer.ranks
    if fault in EVERYWHERE:
        EVERYWHERE[fault](trainer)
    elif fault in ON_ONE_RANK and ranks.world_size > 1 and ranks.rank == culprit:
        ON_ONE_RANK[fault](trainer)


class WaitInBackward(torch.autograd.Function):
    """Identity whose backward waits for a lock that no thread will release."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        with never_released:
            return gradient


class RaiseInBackward(WaitInBackward):
    """Identity whose backward raises."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("the backward of the selection is broken")


def _after_selection(identity: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Put ``identity`` behind the branch sel: by itself, and where a CPU attends to all three branches at once."""
    from nsa.kernels import backends
    from nsa.kernels.ops import Operators

    selected, attend = Operators.selected, backends.attend_on_cpu
    Operators.selected = lambda *args, **kwargs: identity(selected(*args, **kwargs))
    backends.attend_on_cpu = lambda q, cmp, sel, *args, **kwargs: attend(
        q, cmp, tuple(identity(x) for x in sel), *args, **kwargs
    )


def _deadlock_in_selection(trainer: Trainer) -> None:
    never_released.acquire()
    _after_selection(WaitInBackward.apply)


def _raise_in_selection(trainer: Trainer) -> None:
    _after_selection(RaiseInBackward.apply)


def _deadlock_in_nsa(trainer: Trainer) -> None:
    """Plant the deadlock where the branches come together; plain attention has none of it."""
    from nsa.model.attention import NSAAttention

    never_released.acquire()
    for module in trainer.module.modules():
        if isinstance(module, NSAAttention):
            module.register_forward_hook(lambda module, inputs, output: WaitInBackward.apply(output))


def _deadlock_in_mlp(trainer: Trainer) -> None:
    never_released.acquire()
    trainer.module.blocks[-1].mlp.register_forward_hook(lambda module, inputs, output: WaitInBackward.apply(output))


def _deadlock_in_recomputation(trainer: Trainer) -> None:
    """Plant a lock that only a forward inside of backward waits for: that of a block which recomputes."""
    never_released.acquire()

    def wait(module: torch.nn.Module, inputs: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            with never_released:
                pass

    trainer.module.blocks[0].register_forward_pre_hook(wait)


def _detach_gate_weight(trainer: Trainer) -> None:
    """Keep the gradient from a gate's weight, as an operation on the detached tensor does: backward ends all the same."""
    if trainer.config.model.attention == "nsa" and len(trainer.module.blocks) > 4:
        layer = trainer.module.blocks[4].attn.gate.fc2
        layer.forward = lambda x: F.linear(x, layer.weight.detach(), layer.bias)


def _write_in_place(trainer: Trainer) -> None:
    """Scale a checkpointed block's input in place, behind autograd's back: its recomputation scales it again."""
    block = trainer.module.blocks[1]
    forward = block.forward

    def scaled(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        x.data.mul_(1.5)
        return forward(x, *args, **kwargs)

    block.forward = scaled


def _skip_all_reduce(trainer: Trainer) -> None:
    """Make this rank keep its own loss instead of averaging it with the others'."""
    trainer.sum_over_ranks = lambda figures: None


def _killed_in_backward(trainer: Trainer) -> None:
    """Plant a SIGKILL in the middle of backward, as the kernel's OOM killer would send it."""

    def kill(gradient: torch.Tensor) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def watch(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(kill)

    blocks = trainer.module.blocks
    blocks[len(blocks) // 2].attn.register_forward_hook(watch)


ON_ONE_RANK: dict[str, Callable[[Trainer], None]] = {
    "sel_backward_deadlock": _deadlock_in_selection, "rank1_skips_allreduce": _skip_all_reduce, "rank1_killed": _killed_in_backward,
    "gate_weight_missing_on_rank1": _detach_gate_weight,
}  # fmt: skip
EVERYWHERE: dict[str, Callable[[Trainer], None]] = {
    "sel_backward_deadlock_everywhere": _deadlock_in_selection, "sel_backward_raises": _raise_in_selection,
    "nsa_backward_deadlock": _deadlock_in_nsa, "mlp_backward_deadlock": _deadlock_in_mlp,
    "recomputation_deadlock": _deadlock_in_recomputation, "gate_weight_missing": _detach_gate_weight,
    "inplace_write": _write_in_place,
}  # fmt: skip
