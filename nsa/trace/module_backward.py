"""Which modules' backward ran. Full backward hooks on every module are expensive, so only blocks have them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import nn

from nsa.trace import logger
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
    return found or [(name, m) for name, m in model.named_children()]


class ModuleBackwardTrace:
    """Logs ``[MODULE-BWD] step=1 module=blocks.4.attn`` as each module's backward ends, and then those never reached."""

    def __init__(self, model: nn.Module) -> None:
        self.step = 1
        self.reached: list[str] = []
        self._names: list[str] = []
        self._handles: list[Any] = []
        for name, module in block_level(model):
            plain = plain_name(name)
            self._names.append(plain)
            self._handles.append(module.register_full_backward_hook(self._hook(plain)))

    def _hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def ran(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
            self.reached.append(name)
            logger.info("[MODULE-BWD] step=%d module=%s", self.step, name)

        return ran

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

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
