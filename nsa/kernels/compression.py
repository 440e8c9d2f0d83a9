"""The compression of keys and values by the mean over blocks (arXiv 2502.11089, Eq. 7), of sequences and of packs."""

import itertools
from collections.abc import Sequence

import torch

from nsa.kernels.checks import check_dimensions, pack_ends
from nsa.sizes import check_sizes


def compress(
    x: torch.Tensor,
    *,
    compress_block: int = 32,
    compress_stride: int = 16,
    cu_seqlens: torch.Tensor | Sequence[int] | None = None,
) -> torch.Tensor:
    """Return the mean of each block of l tokens, one block every d: keys or values for `nsa_attention`'s k_cmp and v_cmp.

    Args:
        x: [B, S, G, D], of any width D. `NSAAttention` rotates what is compressed, and not what it compresses.
        compress_block, compress_stride: l and d, tokens of a block, and from one block's start to the next's; d divides l.
        cu_seqlens: as in `nsa_attention`. No block lies in two sequences.

    Returns: [B, Nc, G, D], Nc = max(0, (S - l) // d + 1), of a pack the sum over its sequences. Raises ValueError naming the
    argument that does not fit.
    """
    l, d = compress_block, compress_stride
    check_sizes(compress_block=l, compress_stride=d)
    check_dimensions("x", x)
    if cu_seqlens is None:
        return mean_of_blocks(x, l, d)
    return mean_of_blocks(x, l, d, tokens_of_blocks(pack_ends(cu_seqlens, x.shape[0], x.shape[1]), l, d, x.device))


def mean_of_blocks(x: torch.Tensor, l: int, d: int, tokens: torch.Tensor | None = None) -> torch.Tensor:
    """Return `compress` of x [B, S, G, D]. ``tokens``: of a pack, those of each block, int64 [Nc, l]."""
    if tokens is not None:
        return x[:, tokens].mean(2)
    if x.shape[1] < l:
        return x[:, :0]
    strides = x.unfold(1, d, d).mean(-1)  # of d tokens; a block has l / d, and shares them with others
    n = strides.shape[1] - (l // d - 1)
    total = strides[:, :n]
    for i in range(1, l // d):
        total = total + strides[:, i : n + i]
    return total / (l // d) if l > d else total


def tokens_of_blocks(ends: Sequence[int], l: int, d: int, device: torch.device) -> torch.Tensor:
    """Return the tokens of each compression block of a pack, int64 [Nc, l]; no block lies in two sequences."""
    firsts = [first for a, b in itertools.pairwise(ends) for first in range(a, b - l + 1, d)]
    return torch.tensor(firsts, dtype=torch.int64, device="cpu").to(device, non_blocking=True)[:, None] + torch.arange(
        l, device=device
    )
