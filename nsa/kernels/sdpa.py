"""NSA with torch's fused `scaled_dot_product_attention` for the two token branches; CPU and CUDA.

The compressed branch keeps its explicit scores (the selection needs them). The window is cut into chunks of
``w`` queries, each against its own and the previous chunk's keys, so its cost grows as S*w and not as S*S.
"""

import contextlib
import inspect
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from nsa.kernels import blocks
from nsa.kernels.blocks import select
from nsa.kernels.reference import compressed

__all__ = ["compressed", "dense", "select", "selected", "sliding"]

# From Hopper on cuDNN's attention takes half of flash attention's time (docs/benchmarks_nsa.md); torch's own order has flash first.
CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH,
]  # fmt: skip
TAKES_AN_ORDER = "set_priority" in inspect.signature(sdpa_kernel).parameters  # older ones have none


def _expand_groups(x: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Return [B, N, G, D] -> [B, H, N, D], each group's K or V repeated for its query heads."""
    return x.transpose(1, 2).repeat_interleave(n_heads // x.shape[2], dim=1)


def selected(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chosen: torch.Tensor, *, l_sel: int, n_sel: int, scale: float
) -> torch.Tensor:
    """As `reference.selected`: one fused call with the block mask; memory for the mask is B*G*S*S bytes."""
    H, G = q.shape[2], k.shape[2]
    visible = blocks.selected_visible(chosen, l_sel).repeat_interleave(H // G, dim=1)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), _expand_groups(k, H), _expand_groups(v, H), attn_mask=visible, scale=scale
    )
    return out.transpose(1, 2)


@blocks.constant_in_graphs
def prefers_cudnn(device: torch.device) -> bool:
    """Return whether dense attention tries cuDNN's kernel first: on a GPU from sm_90 on, where torch takes an order of kernels."""
    return device.type == "cuda" and TAKES_AN_ORDER and torch.cuda.get_device_capability(device) >= (9, 0)


def _order(device: torch.device) -> AbstractContextManager[object]:
    if prefers_cudnn(device):
        return sdpa_kernel(CUDNN_FIRST, set_priority=True)
    return contextlib.nullcontext()


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float) -> torch.Tensor:
    """Plain causal attention in one fused call, groups as they are. v is filled up to k's width, as flash attention wants it."""
    d_v = v.shape[-1]
    v = F.pad(v, (0, k.shape[-1] - d_v)) if d_v < k.shape[-1] else v
    if q.dtype not in (torch.float16, torch.bfloat16):  # the fused kernel that takes float32 takes no groups
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with _order(q.device):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)[..., :d_v]


def sliding(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, w: int, scale: float) -> torch.Tensor:
    """As `reference.sliding`, in chunks of ``w`` queries against 2w keys."""
    B, S, H, Dk = q.shape
    q, k, v = q.transpose(1, 2), _expand_groups(k, H), _expand_groups(v, H)
    if w >= S:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(1, 2)
    chunks = -(-S // w)
    tail = chunks * w - S
    # One chunk of padding in front gives the first chunk a (masked) predecessor; the tail fills the last one.
    q_chunks = F.pad(q, (0, 0, 0, tail)).reshape(B, H, chunks, w, Dk)
    k_bands = F.pad(k, (0, 0, w, tail)).unfold(2, 2 * w, w).transpose(-1, -2)
    v_bands = F.pad(v, (0, 0, w, tail)).unfold(2, 2 * w, w).transpose(-1, -2)
    i = torch.arange(w, device=q.device)[:, None]
    j = torch.arange(2 * w, device=q.device)[None, :]
    band = (j > i) & (j <= i + w)  # key j of the band is token j - w of the chunk
    exists = torch.arange(chunks, device=q.device)[:, None, None] * w + j >= w
    visible = band & exists
    out = F.scaled_dot_product_attention(
        q_chunks.flatten(1, 2), k_bands.flatten(1, 2), v_bands.flatten(1, 2),
        attn_mask=visible.repeat(H, 1, 1), scale=scale,
    )  # fmt: skip
    return out.reshape(B, H, chunks * w, -1)[:, :, :S].transpose(1, 2)
