"""NSA with flash-attn (an optional package) for the sliding window; the other branches as in `sdpa`."""

from __future__ import annotations

import torch

from nsa.kernels.sdpa import compressed, selected

__all__ = ["compressed", "selected", "sliding", "why_not"]

MAX_HEAD_DIM = 256


def why_not(dtype: torch.dtype, device: torch.device, d_k: int, d_v: int) -> str:
    """'' when flash-attn can serve such tensors, else the reason that it cannot."""
    if device.type != "cuda":
        return f"flash-attn needs a GPU, and the tensors are on {device.type}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"flash-attn takes float16 and bfloat16, not {dtype}"
    if d_k != d_v or d_k > MAX_HEAD_DIM:
        return f"flash-attn takes equal head dims up to {MAX_HEAD_DIM}, not {d_k} and {d_v}"
    return ""


def sliding(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, w: int, scale: float) -> torch.Tensor:
    """As `reference.sliding`. flash-attn's window counts the keys to the left of the query's own."""
    from flash_attn import flash_attn_func

    return flash_attn_func(q, k, v, softmax_scale=scale, causal=True, window_size=(w - 1, 0))
