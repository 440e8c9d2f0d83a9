"""Which modules backward reached. Hooks on every module are expensive, so only blocks have them.

The hooks are on the modules' outputs. torch's full backward hooks would return views in their place, which no line may change
in place, and warn where no input needs a gradient.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from nsa.trace import logger
from nsa.trace.calls.compiled import outside_graphs
from nsa.trace.names import plain_name


def block_level(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the items of every ModuleList and their direct children: blocks, and the attention and MLP inside them."""
    found: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            prefix = f"{name}." if name else ""
            for index, block in module.named_children():
                found.append((f"{prefix}{index}", block))
                found.extend((f"{prefix}{index}.{child}", m) for child, m in block.named_children())
    return found or [*model.named_children()] or [(type(model).__name__, model)]


_TRACED: WeakKeyDictionary[nn.Module, tuple[ModuleBackwardTrace, str]] = WeakKeyDictionary()


@outside_graphs
def _after_forward(module: nn.Module, inputs: Any, output: Any) -> None:
    """Hook the outputs of a traced module. One function for all modules and steps: torch.compile compiles once more for another."""
    trace, name = _TRACED[module]
    trace.hook(name, output)


class ModuleBackwardTrace:
    """Logs ``[MODULE-BWD] step=1 module=blocks.4.attn`` as a gradient of each module's output arrives, then those never reached."""

    def __init__(self, model: nn.Module) -> None:
        self.step = 1
        self.reached: list[str] = []
        self._names: list[str] = []
        self._handles: list[Any] = []
        self._of_leaves: list[Any] = []  # on outputs that outlive the step: a parameter, or an input that is returned
        for name, module in block_level(model):
            plain = plain_name(name) or type(module).__name__
            if plain not in self._names:  # a compiled block contains the module that it was made of
                self._names.append(plain)
                _TRACED[module] = self, plain
                self._handles.append(module.register_forward_hook(_after_forward))

    def hook(self, name: str, output: Any) -> None:
        """Log the module ``name`` once in each backward in which a gradient of its ``output`` arrives."""
        latest = -1

        def reached(_: torch.Tensor) -> None:
            nonlocal latest
            backward = torch._C._current_graph_task_id()
            if backward != latest:
                latest = backward
                self.reached.append(name)
                logger.info("[MODULE-BWD] step=%d module=%s", self.step, name)

        parts = vars(output) if dataclasses.is_dataclass(output) and not isinstance(output, type) else output
        for tensor in tree_leaves(parts):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                handle = tensor.register_hook(outside_graphs(reached))
                if tensor.is_leaf:
                    self._of_leaves.append(handle)

    def not_reached(self) -> list[str]:
        """Return the modules where backward has not run since the last `reset`."""
        reached = set(self.reached)
        return [name for name in self._names if name not in reached]

    def report(self, step: int) -> list[str]:
        """Log the modules that backward never reached, as warnings, and return them."""
        missing = self.not_reached()
        level = logging.WARNING if missing else logging.INFO
        logger.log(level, "[MODULE-BWD] step=%d reached=%d not_reached=%d", step, len(set(self.reached)), len(missing))
        for name in missing:
            logger.warning("  - NOT REACHED: %s", name)
        return missing

    def reset(self, step: int) -> None:
        """Clear the reached modules: to be called before each step's forward."""
        self.step = step
        self.reached.clear()
        self._remove(self._of_leaves)

    def close(self) -> None:
        self._remove(self._handles)
        self._remove(self._of_leaves)

    @staticmethod
    def _remove(handles: list[Any]) -> None:
        for handle in handles:
            handle.remove()
        handles.clear()
