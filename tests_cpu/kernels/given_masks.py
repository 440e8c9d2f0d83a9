"""Selections of blocks that `blocks.select` never makes, and a caller may."""

from __future__ import annotations

import torch

from nsa.kernels import blocks


def masks(B: int, S: int, G: int, l_sel: int) -> dict[str, torch.Tensor]:
    """Return selections bool [B, S, G, Ns] of the kinds that `blocks.select` never makes."""
    n = blocks.num_selection(S, l_sel)
    own = torch.nn.functional.one_hot(torch.arange(S) // l_sel, n).bool()[None, :, None]
    some = torch.rand(B, S, G, n)
    first = torch.zeros(B, S, G, n, dtype=torch.bool)
    first[..., 0] = True
    return {
        "some": some < 0.4,
        "few, and none": some < 0.1,
        "the first alone": first,
        "later ones, too": own | (some < 0.4),
    }
