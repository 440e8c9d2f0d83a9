"""How much arithmetic a token costs, and which share of a device's peak a run reaches (model FLOPs utilisation, MFU)."""

from __future__ import annotations

import torch
from torch import nn

from nsa.config import ModelConfig

# Dense bf16 matrix products, FLOP/s, as the vendors state them. MFU after arXiv 2204.02311, appendix B.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}


def keys_seen(m: ModelConfig, seq_len: int) -> float:
    """Return how many keys a query of a sequence of ``seq_len`` tokens attends to on average, in all branches together."""
    if m.attention == "dense":
        return (seq_len + 1) / 2
    t = torch.arange(1, seq_len + 1, dtype=torch.float64)  # tokens up to and with the query
    compressed = ((t - m.compress_block).div(m.compress_stride, rounding_mode="floor") + 1).clamp(min=0)
    selected = t.clamp(max=m.n_select * m.select_block)
    return float((compressed + selected + t.clamp(max=m.window)).mean())


def flops_per_token(module: nn.Module, m: ModelConfig, seq_len: int) -> float:
    """Return the FLOP of forward and backward per token: 6 per weight of a matrix product, 6 (d_k + d_v) per head and key.

    Recomputation under gradient checkpointing is not counted.
    """
    weights = sum(p.numel() for name, p in module.named_parameters() if p.ndim > 1 and "embed" not in name)
    return 6.0 * weights + 6.0 * m.n_layers * m.n_heads * (m.head_dim + m.v_head_dim) * keys_seen(m, seq_len)


def peak_flops(device: torch.device) -> float | None:
    """Return the peak of one device in bf16, in FLOP/s; None if unknown."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)
