"""Integer maths of NSA's blocks, 0-based, and the selection that follows from it (no gradient flows here).

Symbols as in arXiv 2502.11089: S tokens, block i of the compression covers tokens i*d ... i*d + l - 1,
selection block j covers j*l_sel ... (j + 1)*l_sel - 1.
"""

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from nsa.sizes import NUM_LOCAL

_Function = TypeVar("_Function", bound=Callable[..., Any])


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return what is summed in: float32 for the half types."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Return what keeps a computation's own dtypes under the caller's autocast; the device meta has none."""
    return contextlib.nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def constant_in_graphs(function: _Function) -> _Function:
    """Have a compiled graph hold the function's result, of the call as the graph is traced.

    As `torch.compiler.assume_constant_result` does, without the second that it takes to import the compiler.
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function


def num_compressed(seq_len: int, l: int, d: int) -> int:
    """Return how many whole compression blocks fit in ``seq_len`` tokens."""
    return max(0, (seq_len - l) // d + 1)


def num_selection(seq_len: int, l_sel: int) -> int:
    """Return how many selection blocks, the last perhaps partial, cover ``seq_len`` tokens."""
    return -(-seq_len // l_sel)


def compressed_visible(end: int, n_cmp: int, l: int, d: int, device: torch.device, first: int = 0) -> torch.Tensor:
    """bool [end - first, Nc]: block i is visible to query t when its last token is not later, i*d + l - 1 <= t."""
    t = torch.arange(first, end, device=device)
    last = torch.arange(n_cmp, device=device) * d + (l - 1)
    return last[None, :] <= t[:, None]


def overlap(
    n_cmp: int, n_blocks: int, l: int, d: int, l_sel: int, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """Return [Nc, Ns]: the number of strides of d tokens that compression block i and selection block j share (Eq. 9).

    Strides of i are i ... i + l/d - 1; of j they are j*r ... j*r + r - 1, with r = l_sel/d.
    """
    i = torch.arange(n_cmp, device=device)[:, None]
    j = torch.arange(n_blocks, device=device)[None, :]
    r = l_sel // d
    shared = torch.minimum(i + l // d, (j + 1) * r) - torch.maximum(i, j * r)
    return shared.clamp(min=0).to(dtype)


def select(importance: torch.Tensor, l_sel: int, n_sel: int, first: int = 0) -> torch.Tensor:
    """bool [B, S, G, Ns]: the blocks that each query of each group attends to (Eq. 11).

    importance [B, S, G, Ns], already summed over the heads of a group (Eq. 10). Only blocks j <= t // l_sel
    are candidates; block 0 and the ``NUM_LOCAL`` latest are always in. Ties go to the lower index, so that
    every rank and every recomputation selects the same. ``first`` is the position of the first query.
    """
    seq_len, n_blocks = importance.shape[1], importance.shape[3]
    own = (torch.arange(first, first + seq_len, device=importance.device) // l_sel)[:, None]  # [S, 1]
    j = torch.arange(n_blocks, device=importance.device)[None, :]  # [1, Ns]
    candidate = j <= own
    forced = candidate & ((j == 0) | (j > own - NUM_LOCAL))
    score = importance.masked_fill(forced[None, :, None], float("inf"))
    score = score.masked_fill(~candidate[None, :, None], float("-inf"))
    best = torch.sort(score, dim=-1, descending=True, stable=True).indices[..., : min(n_sel, n_blocks)]
    chosen = torch.zeros_like(score, dtype=torch.bool).scatter(-1, best, True)
    return chosen & candidate[None, :, None]


def window_visible(seq_len: int, w: int, device: torch.device) -> torch.Tensor:
    """bool [S, S]: query t sees tokens t - w + 1 ... t."""
    t = torch.arange(seq_len, device=device)
    back = t[:, None] - t[None, :]
    return (back >= 0) & (back < w)


def selected_visible(chosen: torch.Tensor, l_sel: int, first: int = 0, end: int | None = None) -> torch.Tensor:
    """bool [B, G, queries, end] from ``chosen`` [B, S, G, Ns]: the tokens of chosen blocks, cut at the query itself.

    Of queries first ... end - 1, and the keys before ``end``; of all S by default.
    """
    end = chosen.shape[1] if end is None else end
    t = torch.arange(end, device=chosen.device)
    tokens = chosen[:, first:end].permute(0, 2, 1, 3)[..., t // l_sel]
    return tokens & (t[None, :] <= t[first:, None])
