"""The whole of NSA on a GPU as operators of torch.library: opaque to torch.compile, one node in the autograd graph.

Triton is imported as they run, not before: a machine without it can import this.
"""

from __future__ import annotations

from typing import Any

import torch

from nsa.kernels import blocks, derivatives
from nsa.kernels.ops import Pair, alone_has_a_gradient, of_the_first, plainly, positive_scale
from nsa.sizes import Sizes

KEPT = 7  # outputs behind the first, which have no gradient


@torch.library.custom_op("nsa::attention", mutates_args=())
@plainly
def attention(
    q: torch.Tensor, k_cmp: torch.Tensor, v_cmp: torch.Tensor, k_sel: torch.Tensor, v_sel: torch.Tensor, k_win: torch.Tensor,
    v_win: torch.Tensor, gates: torch.Tensor, cu_seqlens: torch.Tensor | None, l: int, d: int, l_sel: int, n_sel: int, w: int,
    scale: float,
) -> tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]:  # fmt: skip
    """Return Eq. 5, [B, S, H, Dv], and what `whole.Kept` names. ``cu_seqlens``: a pack's, on the CPU, so that nothing waits for
    the device.
    """
    from nsa.kernels.triton import whole

    pairs = (k_cmp, v_cmp), (k_sel, v_sel), (k_win, v_win)
    out, kept = whole.forward(q, *pairs, gates, cu_seqlens, Sizes(l, d, l_sel, n_sel, w), scale)
    return out, *kept


@attention.register_fake
def _(
    q: torch.Tensor, k_cmp: torch.Tensor, v_cmp: torch.Tensor, k_sel: torch.Tensor, v_sel: torch.Tensor, k_win: torch.Tensor,
    v_win: torch.Tensor, gates: torch.Tensor, cu_seqlens: torch.Tensor | None, l: int, d: int, l_sel: int, n_sel: int, w: int,
    scale: float,
) -> Any:  # fmt: skip
    from nsa.kernels.triton import whole

    kept = whole.empty_kept(q, v_sel, cu_seqlens, Sizes(l, d, l_sel, n_sel, w))
    return q.new_empty(*q.shape[:3], v_sel.shape[-1]), *kept


@torch.library.custom_op("nsa::attention_backward", mutates_args=())
@plainly
def attention_backward(
    grad: torch.Tensor, q: torch.Tensor, k_cmp: torch.Tensor, v_cmp: torch.Tensor, k_sel: torch.Tensor, v_sel: torch.Tensor,
    k_win: torch.Tensor, v_win: torch.Tensor, gates: torch.Tensor, o_cmp: torch.Tensor, o_sel: torch.Tensor,
    o_win: torch.Tensor, lse: torch.Tensor, picks: torch.Tensor, entries: torch.Tensor, totals: torch.Tensor,
    cu_seqlens: torch.Tensor | None, l: int, d: int, l_sel: int, n_sel: int, w: int, scale: float,
) -> tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]:  # fmt: skip
    """Return gradients of q, keys and values, and gates, in the order of the arguments."""
    from nsa.kernels.triton import whole

    pairs = (k_cmp, v_cmp), (k_sel, v_sel), (k_win, v_win)
    kept = whole.Kept(o_cmp, o_sel, o_win, lse, picks, entries, totals)
    return whole.backward(grad, q, *pairs, gates, kept, cu_seqlens, Sizes(l, d, l_sel, n_sel, w), scale)


@attention_backward.register_fake
def _(grad: torch.Tensor, *others: Any) -> Any:
    return tuple(x.new_empty(x.shape) for x in others[:8])


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    alone_has_a_gradient(ctx, *output[1:])
    tensors, cu_seqlens, ctx.sizes = inputs[:8], inputs[8], inputs[9:]
    ctx.save_for_backward(*tensors, *output[1:], *(() if cu_seqlens is None else (cu_seqlens,)))


@of_the_first
def _backward(ctx: Any, grad: torch.Tensor) -> Any:
    saved, count = ctx.saved_tensors, 8 + KEPT
    cu_seqlens = saved[count] if len(saved) > count else None
    found = attention_backward(grad.to(saved[0].dtype), *saved[:count], cu_seqlens, *ctx.sizes)
    return *found, *(None for _ in range(7))


derivatives.register(attention, _backward, _setup)
derivatives.register(attention_backward, derivatives.refuse)


@torch.library.custom_op("nsa::selection_mask", mutates_args=())
def selection_mask(picks: torch.Tensor, n_blocks: int) -> torch.Tensor:
    """Return bool [T, G, n_blocks], as `blocks.select` makes it, of picks int32 [T, G, n]."""
    from nsa.kernels.triton import single

    return single.mask_of(picks, n_blocks)


@selection_mask.register_fake
def _(picks: torch.Tensor, n_blocks: int) -> torch.Tensor:
    return picks.new_empty(*picks.shape[:2], n_blocks, dtype=torch.bool)


@torch.library.custom_op("nsa::rotate", mutates_args=())
def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, backward: bool) -> torch.Tensor:
    """Return x [B, N, heads, D] turned by cos and signed sin [1, N, 1, D], or its gradient turned back: `triton.rotary`."""
    from nsa.kernels.triton import rotary

    return rotary.rotated(x, cos, sin, backward=backward)


@rotate.register_fake
def _(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, backward: bool) -> torch.Tensor:
    return x.new_empty(x.shape)


def _keep_table(ctx: Any, inputs: Any, output: Any) -> None:
    _, cos, sin, ctx.is_backward = inputs
    ctx.save_for_backward(cos, sin)


def _turn_back(ctx: Any, grad: torch.Tensor) -> Any:
    return rotate(grad, *ctx.saved_tensors, not ctx.is_backward), None, None, None


derivatives.register(rotate, _turn_back, _keep_table)


def attend_on_gpu(
    q: torch.Tensor, cmp: Pair, sel: Pair, win: Pair, gates: torch.Tensor, cu_seqlens: torch.Tensor | None, sizes: Sizes,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return `dispatch.attend` by the triton backend: the output, and the picks int32 [B * S, G, n] of each query."""
    q, scale = positive_scale(q, scale)
    l, d, l_sel, n_sel, w = sizes
    w, n_sel = min(w, q.shape[1]), min(n_sel, blocks.num_selection(q.shape[1], l_sel))
    found = attention(q, *cmp, *sel, *win, gates, cu_seqlens, l, d, l_sel, n_sel, w, scale)
    return found[0], found[5]
