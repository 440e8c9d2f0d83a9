"""Causal attention and NSA by others, of q [1, S, H, Dk], k [1, S, G, Dk] and v [1, S, G, Dv], for attention_gpu.py."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from nsa.kernels.triton import support
from nsa.sizes import Sizes


def fused(backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Compute causal attention by one of torch's fused kernels."""
    if backend == "flash" and v.shape[-1] < q.shape[-1]:  # it requires equal head dims
        v = F.pad(v, (0, q.shape[-1] - v.shape[-1]))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    kind = torch.nn.attention.SDPBackend
    wanted = {"flash": kind.FLASH_ATTENTION, "cudnn": kind.CUDNN_ATTENTION}[backend] if q.is_cuda else kind.MATH
    with torch.nn.attention.sdpa_kernel(wanted):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)


def flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Compute causal attention by FlexAttention; compiled where there is a GPU."""
    from torch.nn.attention.flex_attention import flex_attention

    run = compiled(flex_attention) if q.is_cuda else flex_attention
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out: torch.Tensor = run(q, k, v, block_mask=causal_mask(q.shape[2], q.device), scale=scale, enable_gqa=True)
    return out


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


@functools.cache
def causal_mask(S: int, device: torch.device) -> Any:
    """Return FlexAttention's causal mask, made once per length and device."""
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda b, h, i, j: i >= j, None, None, S, S, device=device)


def flash_attn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Compute causal attention by the package of that name."""
    from flash_attn import flash_attn_func

    out: torch.Tensor = flash_attn_func(q, k, v, softmax_scale=scale, causal=True)
    return out


def fla(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gates: torch.Tensor, scale: float, sizes: Sizes
) -> torch.Tensor:
    """Compute fla's NSA: one K and V for all branches, means as compression, blocks of l' tokens that do not overlap.

    Its window is flash-attn's: without that package, two branches. Groups are filled up to 16 heads, as it needs.
    """
    from fla.ops.nsa.parallel import parallel_nsa

    H, G = q.shape[2], k.shape[2]
    missing = max(0, 16 - H // G)
    if missing:
        q = F.pad(q.unflatten(2, (G, H // G)), (0, 0, 0, missing)).flatten(2, 3)
        gates = F.pad(gates.unflatten(2, (G, H // G)), (0, 0, 0, missing)).flatten(2, 3)
    each = [gate.contiguous() for gate in gates.unbind(-1)]
    out: torch.Tensor = parallel_nsa(
        q, k, v, g_cmp=each[0], g_slc=each[1], g_swa=each[2], block_counts=sizes.n_select, block_size=sizes.select_block,
        window_size=sizes.window if support.is_installed("flash_attn") else 0, scale=scale,
    )  # fmt: skip
    return out


def cudnn_nsa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chosen: torch.Tensor, scale: float, sizes: Sizes
) -> Callable[[], torch.Tensor]:
    """Return a call of the selected branch alone by the package nvidia-cudnn-frontend (experimental, forward only).

    ``chosen``, bool [1, S, G, Ns], is made into its lists beforehand: they are its input. ImportError where it is missing.
    """
    from cudnn import NSA

    n_sel, n_blocks = min(sizes.n_select, chosen.shape[-1]), chosen.shape[-1]
    counts = chosen[0].sum(-1, dtype=torch.int32)
    numbers = torch.arange(n_blocks, device=q.device, dtype=torch.int32)
    picks = torch.where(chosen[0], numbers, n_blocks).sort(-1).values[..., :n_sel]
    picks = torch.where(picks < n_blocks, picks, 0).contiguous()
    ends = torch.tensor([0, q.shape[1]], device=q.device, dtype=torch.int32)

    def run() -> torch.Tensor:
        out: torch.Tensor = NSA.selection_attention_wrapper(
            q[0], k[0], v[0], picks, counts, ends, ends, block_size=sizes.select_block, scale_softmax=scale, max_s_q=q.shape[1],
            max_s_k=q.shape[1], is_causal=True,
        )["o_tensor"]  # fmt: skip
        return out

    return run
