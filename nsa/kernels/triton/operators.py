"""The whole of NSA on a GPU as operators of torch: opaque to torch.compile, one node in the autograd graph.

Triton is imported as they run, not before: a machine without it can import this.
"""

from typing import Any

import torch

from nsa.kernels.cpu.whole import Pair
from nsa.kernels.derivatives import operator, refuse, register
from nsa.kernels.ops import alone_has_a_gradient, like, of_the_first, plainly, returns, tensors
from nsa.sizes import Sizes

INPUTS = ("q", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "gates")
KEPT = (
    "o_cmp",
    "o_sel",
    "o_win",
    "lse",
    "picks",
    "entries",
    "totals",
)  # outputs behind the first, which have no gradient
OTHERS = "Tensor? cu_seqlens, SymInt l, SymInt d, SymInt l_sel, SymInt n_sel, SymInt w, float scale"


@plainly
def _forward(q: torch.Tensor, *given: Any) -> Any:
    from nsa.kernels.triton import whole

    pairs, (gates, cu_seqlens, *sizes, scale) = (given[0:2], given[2:4], given[4:6]), given[6:]
    out, kept = whole.forward(q, *pairs, gates, cu_seqlens, Sizes(*sizes), scale)
    return out, *kept


def _fake(q: torch.Tensor, *given: Any) -> Any:
    from nsa.kernels.triton import whole

    v_sel, (cu_seqlens, *sizes, _) = given[3], given[7:]
    return q.new_empty(*q.shape[:3], v_sel.shape[-1]), *whole.empty_kept(q, v_sel, cu_seqlens, Sizes(*sizes))


@plainly
def _backward(grad: torch.Tensor, q: torch.Tensor, *given: Any) -> Any:
    from nsa.kernels.triton import whole

    pairs, kept, (cu_seqlens, *sizes, scale) = (given[0:2], given[2:4], given[4:6]), given[7:14], given[14:]
    return whole.backward(grad, q, *pairs, given[6], whole.Kept(*kept), cu_seqlens, Sizes(*sizes), scale)


# Eq. 5, [B, S, H, Dv], and what `whole.Kept` names. ``cu_seqlens``: a pack's, on the CPU, so that nothing waits for the device.
attention = operator("attention", f"({tensors(*INPUTS)}, {OTHERS}) -> {returns(1 + len(KEPT))}", _forward, _fake)
# Gradients of q, keys and values, and gates, in the order of the arguments.
attention_backward = operator(
    "attention_backward", f"({tensors('grad', *INPUTS, *KEPT)}, {OTHERS}) -> {returns(8)}", _backward,
    lambda grad, *others: like(*others[:8]),
)  # fmt: skip


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    alone_has_a_gradient(ctx, *output[1:])
    cu_seqlens, ctx.sizes = inputs[8], inputs[9:]
    ctx.save_for_backward(*inputs[:8], *output[1:], *(() if cu_seqlens is None else (cu_seqlens,)))


@of_the_first
def _differentiate(ctx: Any, grad: torch.Tensor) -> Any:
    saved, count = ctx.saved_tensors, len(INPUTS) + len(KEPT)
    cu_seqlens = saved[count] if len(saved) > count else None
    found = attention_backward(grad.to(saved[0].dtype), *saved[:count], cu_seqlens, *ctx.sizes)
    return *found, *(None for _ in range(7))


register(attention, _differentiate, _keep)
register(attention_backward, refuse)


def _mask(picks: torch.Tensor, n_blocks: int) -> torch.Tensor:
    from nsa.kernels.triton import single

    return single.mask_of(picks, n_blocks)


# bool [T, G, n_blocks], as `blocks.select` makes it, of picks int32 [T, G, n].
selection_mask = operator(
    "selection_mask", "(Tensor picks, SymInt n_blocks) -> Tensor", _mask,
    lambda picks, n_blocks: picks.new_empty(*picks.shape[:2], n_blocks, dtype=torch.bool),
)  # fmt: skip


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, backward: bool) -> torch.Tensor:
    from nsa.kernels.triton import rotary

    return rotary.rotated(x, cos, sin, backward=backward)


# x [B, N, heads, D] turned by cos and signed sin [1, N, 1, D], or its gradient turned back: `triton.rotary`.
rotate = operator(
    "rotate", "(Tensor x, Tensor cos, Tensor sin, bool backward) -> Tensor", _rotate, lambda x, *_: x.new_empty(x.shape)
)


def _keep_table(ctx: Any, inputs: Any, output: Any) -> None:
    _, cos, sin, ctx.is_backward = inputs
    ctx.save_for_backward(cos, sin)


def _turn_back(ctx: Any, grad: torch.Tensor) -> Any:
    return rotate(grad, *ctx.saved_tensors, not ctx.is_backward), None, None, None


register(rotate, _turn_back, _keep_table)


def attend_on_gpu(
    q: torch.Tensor, cmp: Pair, sel: Pair, win: Pair, gates: torch.Tensor, cu_seqlens: torch.Tensor | None, sizes: Sizes,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return `dispatch.attend` by the triton backend: the output, and the picks int32 [B * S, G, n] of each query."""
    l, d, l_sel, n_sel, w = sizes
    found = attention(q, *cmp, *sel, *win, gates, cu_seqlens, l, d, l_sel, n_sel, w, scale)
    return found[0], found[5]
