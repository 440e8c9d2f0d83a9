"""Gradient checkpointing: which layers run forward a second time in backward instead of keeping activations."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from nsa.config import Config
from nsa.kernels.backends import refuse_to_keep_selection


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRange:
    """Layers start <= i < end recompute. ``reentrant`` is torch's older form; only a named scenario wants it.

    ``keep_selection``: which blocks a layer selected is kept, bool [B, S, G, Ns], so that nothing is selected twice; on a GPU,
    whose kernels select and attend in one operator, with what that returned (four outputs [B, S, H, Dv]).
    """

    start: int
    end: int
    reentrant: bool = False
    keep_selection: bool = False

    def __contains__(self, layer: int) -> bool:
        return self.start <= layer < self.end

    @classmethod
    def from_config(cls, config: Config) -> Self | None:
        """Return the layers that ``config`` requests; None when checkpointing is off. ConfigError for what cannot be kept."""
        train = config.train
        if not train.gradient_checkpointing:
            return None
        if train.gc_keep_selection:
            refuse_to_keep_selection(config.model.backend)
        start, end = train.gc_range or (0, config.model.n_layers)
        return cls(start=start, end=end, reentrant=train.gc_reentrant, keep_selection=train.gc_keep_selection)


def run_block(block: Callable[..., torch.Tensor], *inputs: Any, recompute: CheckpointRange) -> torch.Tensor:
    """Call ``block(*inputs)``, its inner activations dropped and recomputed in backward; returns [B, S, dim]."""
    if recompute.keep_selection:
        keep = functools.partial(create_selective_checkpoint_contexts, _keep_selection)
        return checkpoint(block, *inputs, use_reentrant=False, context_fn=keep)
    return checkpoint(block, *inputs, use_reentrant=recompute.reentrant)


def _keep_selection(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    # On a GPU one operator selects and attends: all that it returned is kept, and none of it computed twice.
    if getattr(operator, "_name", "").partition(".")[0] in ("nsa::select", "nsa::attention"):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
