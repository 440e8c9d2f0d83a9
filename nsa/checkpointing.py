"""Gradient checkpointing: which layers run forward a second time in backward instead of keeping activations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils.checkpoint import checkpoint

from nsa.config import Config


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRange:
    """Layers start <= i < end recompute. ``reentrant`` is torch's older form; only a named scenario wants it."""

    start: int
    end: int
    reentrant: bool = False

    def __contains__(self, layer: int) -> bool:
        return self.start <= layer < self.end

    @classmethod
    def from_config(cls, config: Config) -> CheckpointRange | None:
        """The layers that ``config`` asks for; None when checkpointing is off."""
        if not config.train.gradient_checkpointing:
            return None
        start, end = config.train.gc_range or (0, config.model.n_layers)
        return cls(start=start, end=end, reentrant=config.train.gc_reentrant)


def run_block(block: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, *, reentrant: bool) -> torch.Tensor:
    """``block(x)``, its inner activations dropped and recomputed in backward. x: [B, S, dim]."""
    return checkpoint(block, x, use_reentrant=reentrant)
