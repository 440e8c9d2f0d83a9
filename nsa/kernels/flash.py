"""NSA with flash-attn (an optional package) for the sliding window, and for dense attention, which is a window of all tokens.

Where flash-attn is not installed torch's own fused attention takes its place. The other branches are Triton's, or sdpa's.
"""

from collections.abc import Callable
from typing import Any

import torch

from nsa.kernels import ops, sdpa
from nsa.kernels.blocks import select
from nsa.kernels.triton import support

__all__ = ["compressed", "select", "selected", "sliding", "why_not"]

MAX_HEAD_DIM = 256


def why_not(dtype: torch.dtype, device: torch.device, d_k: int, d_v: int) -> str:
    """'' when flash-attn, or torch in its place, can serve such tensors, else the reason that it cannot."""
    if device.type != "cuda":
        return f"flash-attn needs a GPU, and the tensors are on {device.type}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"flash-attn takes float16 and bfloat16, not {dtype}"
    if is_there() and (d_k != d_v or d_k > MAX_HEAD_DIM):
        return f"flash-attn takes equal head dims up to {MAX_HEAD_DIM}, not {d_k} and {d_v}"
    return ""


def is_there() -> bool:
    """Return whether flash-attn is installed."""
    return support.is_installed("flash_attn")


def _by_others(branch: str) -> Callable[..., Any]:
    """Return a branch by Triton's kernels, or by sdpa where they cannot serve; called as `reference` has it."""

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: torch.Tensor, **settings: float) -> Any:
        reason = support.why_not(q.dtype, q.device, q.shape[-1], v.shape[-1])
        return getattr(sdpa if reason else ops.Operators("triton"), branch)(q, k, v, *others, **settings)

    return run


compressed, selected = _by_others("compressed"), _by_others("selected")


def sliding(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, w: int, scale: float) -> torch.Tensor:
    """As `reference.sliding`. flash-attn's window counts the keys to the left of the query's own."""
    if not is_there():
        return sdpa.sliding(q, k, v, w=w, scale=scale)
    from flash_attn import flash_attn_func

    return flash_attn_func(q, k, v, softmax_scale=scale, causal=True, window_size=(w - 1, 0))
