"""What attention calls hand on together: the sizes of blocks and window, and a branch's keys and values."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Sizes(NamedTuple):
    """Compression block and stride (l, d), selection block and blocks selected per query (l_sel, n_sel), window (w), in tokens."""

    l: int
    d: int
    l_sel: int
    n_sel: int
    w: int

    def by_name(self) -> dict[str, int]:
        """Return them as keyword arguments: torch 2.6 compiles this, and `_asdict` breaks its graph."""
        return {"l": self.l, "d": self.d, "l_sel": self.l_sel, "n_sel": self.n_sel, "w": self.w}


class KV(NamedTuple):
    """Keys [B, N, G, Dk] and values [B, N, G, Dv] of a branch."""

    k: torch.Tensor
    v: torch.Tensor

    def between(self, first: int, end: int) -> KV:
        """Return those of tokens, or blocks, first ... end - 1."""
        return KV(self.k[:, first:end], self.v[:, first:end])
