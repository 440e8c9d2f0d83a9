"""Hooks that keep the board true for any nn.Module: phase, step, module, gradients. No change to the model is needed.

Only cheap hooks, always on: a global forward hook, one post-accumulate hook a parameter, torch.autograd.backward
and the optimizer's own hooks.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from nsa.trace.board import Board
from nsa.trace.ddp_buckets import ensure_hook, give_way_to_user_hooks, note_kept_gradients
from nsa.trace.frames import call_site


def plain_name(name: str) -> str:
    """A parameter's or module's name without the prefixes that DDP, FSDP and checkpoint wrappers add."""
    for wrapper in ("module.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod."):
        name = name.replace(wrapper, "")
    return name


def _ignore(*_: Any) -> None:
    """Nobody listens."""


def _parallel_kind(root: nn.Module) -> str:
    if isinstance(root, DistributedDataParallel):
        return "ddp"
    return (
        "fsdp"
        if any(type(m).__name__.startswith(("FSDP", "FullyShardedDataParallel")) for m in root.modules())
        else "none"
    )


class Observer:
    """Installs the hooks in this process.

    ``on_change()`` is told of each new phase, ``on_names(names)`` of a new model's parameters, ``on_model(kind)`` of
    how it is shared: ddp, fsdp or none.
    """

    on_change: Callable[[], None]
    on_names: Callable[[list[str]], None]
    on_model: Callable[[str], None]
    parameter_names: list[str]
    _names: WeakKeyDictionary[nn.Module, str]
    _roots: WeakSet[nn.Module]
    _model: weakref.ref[nn.Module] | None  # the root with the most trained parameters: its calls are steps

    def __init__(self, board: Board) -> None:
        self.board = board
        self.forget()

    def forget(self) -> None:
        """Another test or training begins in this process: its models are not those seen so far."""
        self.on_change = self.on_model = self.on_names = _ignore
        self.parameter_names = []
        self._names = WeakKeyDictionary()
        self._roots = WeakSet()
        self._model = None
        self._depth = 0
        self._in_backward = False

    def install(self) -> None:
        """Register everything, once a process."""
        torch_module.register_module_forward_pre_hook(self._before_forward)
        torch_module.register_module_forward_hook(self._after_forward, always_call=True)
        register_optimizer_step_pre_hook(lambda *_: self._phase("optimizer"))
        register_optimizer_step_post_hook(lambda *_: self._phase("body"))
        backward = torch.autograd.backward

        def observed_backward(*args: Any, **kwargs: Any) -> None:
            if self._in_backward:  # reentrant checkpointing runs a backward inside a backward
                return backward(*args, **kwargs)
            self._in_backward = True
            for root in self._roots:
                note_kept_gradients(root)
            self.board.reset("gradients")
            self.board.clear_arrived()
            self._phase("backward")
            try:
                return backward(*args, **kwargs)
            finally:
                self._in_backward = False
                self._phase("body")

        torch.autograd.backward = observed_backward
        give_way_to_user_hooks()

    def _phase(self, name: str) -> None:
        self.board.phase(name)
        place = call_site()
        if place:  # so that the line of a rank that is killed is known without waiting for the next beat
            self.board.text("line", place)
            self.board.text("phase_line", place)
            self.board.number("line_time", time.time())
        self.on_change()

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if self._depth == 0 and not self._in_backward:
            if module not in self._roots:
                self._adopt(module)
            if self._is_model(module):  # a loss module, say, is a root too, and no phase of its own
                if module.training and torch.is_grad_enabled():
                    self.board.add("step")
                self._phase("forward")
        self._depth += 1
        self.board.add("modules_entered")
        self.board.add("progress")
        self.board.text("module", self._names.get(module, type(module).__name__))

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth = max(0, self._depth - 1)
        if self._depth == 0 and not self._in_backward and self._is_model(module):
            self._phase("body")

    def _is_model(self, module: nn.Module) -> bool:
        return self._model is not None and self._model() is module

    def _adopt(self, root: nn.Module) -> None:
        """A module that is called from outside any other: learn its names, count its gradients."""
        self._roots.add(root)
        for name, module in root.named_modules():
            self._names[module] = plain_name(name) or type(module).__name__
        if isinstance(root, DistributedDataParallel):
            ensure_hook(root)
        self.on_model(_parallel_kind(root))
        trained = [(plain_name(n), p) for n, p in root.named_parameters() if p.requires_grad]
        if not trained or len(trained) < len(self.parameter_names):
            return
        self._model = weakref.ref(root)
        self.parameter_names = [n for n, _ in trained]
        self.board.number("gradients_expected", len(trained))
        self.on_names(self.parameter_names)
        for index, (name, parameter) in enumerate(trained):
            parameter.register_post_accumulate_grad_hook(self._arrival(index, name))

    def _arrival(self, index: int, name: str) -> Callable[[torch.Tensor], None]:
        def arrived(_: torch.Tensor) -> None:
            self.board.add("gradients")
            self.board.mark_arrived(index)
            self.board.add("progress")
            self.board.text("parameter", name)

        return arrived
