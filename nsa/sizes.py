"""What attention calls hand on together: the sizes of blocks and window, and a branch's keys and values.

Nothing here imports torch, so that a configuration is checked without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import torch

Branch = Literal["cmp", "sel", "win"]
BRANCHES: tuple[Branch, ...] = ("cmp", "sel", "win")

# Block 0, the query's own block and the one before are always selected (paper, section 4.1).
NUM_LOCAL = 2


class Sizes(NamedTuple):
    """The sizes of one attention, in tokens, with the paper's defaults; its letters are l, d, l', n and w, which the kernels use.

    A compressed block is ``compress_block`` tokens, one begins every ``compress_stride``. A query selects ``n_select`` blocks of
    ``select_block`` tokens, and its window is the last ``window`` tokens.
    """

    compress_block: int = 32
    compress_stride: int = 16
    select_block: int = 64
    n_select: int = 16
    window: int = 512

    def check(self) -> Sizes:
        """Return them. Raises ValueError naming a size that is no number, is too small or does not fit another."""
        check_sizes(**self._asdict())
        return self


class KV(NamedTuple):
    """Keys [B, N, G, Dk] and values [B, N, G, Dv] of a branch."""

    k: torch.Tensor
    v: torch.Tensor

    def between(self, first: int, end: int) -> KV:
        """Return those of tokens, or blocks, first ... end - 1."""
        return KV(self.k[:, first:end], self.v[:, first:end])


def check_sizes(**sizes: Any) -> None:
    """Raise ValueError for sizes that do not fit each other; the message names the one that does not. Any fields of `Sizes`."""
    for name, value in sizes.items():
        # A bool is an int, and no size; torch.export counts with SymInt.
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise ValueError(f"{name}={value!r}: must be a whole number")
        least = 1 + NUM_LOCAL if name == "n_select" else 1
        if value < least:
            forced = " (the first block and 2 local ones are always selected)" if least > 1 else ""
            raise ValueError(f"{name}={value}: must be at least {least}{forced}")
    stride = sizes.get("compress_stride", 1)
    for name in ("compress_block", "select_block"):
        if sizes.get(name, 0) % stride:
            raise ValueError(f"{name}={sizes[name]}: must be a multiple of compress_stride={stride}")
