"""What the arguments of attention calls must be: each refusal is one line that names the argument."""

from collections.abc import Sequence
from itertools import pairwise

import torch


def pack_ends(cu_seqlens: torch.Tensor | Sequence[int], batch: int, tokens: int) -> list[int]:
    """Return ``cu_seqlens`` as numbers. Raises ValueError where they are not a packing of ``tokens`` tokens."""
    given = cu_seqlens.tolist() if isinstance(cu_seqlens, torch.Tensor) else cu_seqlens
    if not isinstance(given, list | tuple) or not all(isinstance(one, int) for one in given):
        found = (
            f"shape {tuple(cu_seqlens.shape)}, {cu_seqlens.dtype}"
            if isinstance(cu_seqlens, torch.Tensor)
            else repr(cu_seqlens)[:80]
        )
        raise ValueError(
            f"cu_seqlens must be one row of whole numbers, as in [0, {tokens // 2}, {tokens}]; got {found}"
        )
    ends = list(given)
    if batch != 1:
        raise ValueError(f"cu_seqlens needs batch 1, got {batch}")
    if len(ends) < 2 or ends[0] != 0 or ends[-1] != tokens or any(b < a for a, b in pairwise(ends)):
        raise ValueError(f"cu_seqlens={ends}: must start at 0, never fall, and end at S={tokens}")
    return ends


def check_compressed(
    q: torch.Tensor, k_cmp: torch.Tensor, v_cmp: torch.Tensor, k_sel: torch.Tensor, v_sel: torch.Tensor,
    gates: torch.Tensor,
) -> None:  # fmt: skip
    B, S, H, Dk = q.shape
    _check_dimensions({"k_cmp": k_cmp, "v_cmp": v_cmp})
    _check_dimensions({"gates": gates}, last="3")
    G, n_cmp = k_sel.shape[2], k_cmp.shape[1]
    _check_one("k_cmp", k_cmp, (B, n_cmp, G, Dk), q)
    _check_one("v_cmp", v_cmp, (B, n_cmp, G, v_sel.shape[3]), q)
    _check_one("gates", gates, (B, S, H, 3), q)


def check_tensors(q: torch.Tensor, keys: dict[str, torch.Tensor], values: dict[str, torch.Tensor]) -> None:
    """Raise ValueError where keys and values, by their arguments' names, are not q's: shape, device and dtype.

    q [B, S, H, Dk], each of ``keys`` [B, S, G, Dk], of ``values`` [B, S, G, Dv].
    """
    _check_dimensions({"q": q, **keys, **values})
    if not q.is_floating_point():
        raise ValueError(f"q is {q.dtype}: must be a floating point dtype")
    B, S, H, Dk = q.shape
    G, Dv = next(iter(keys.values())).shape[2], next(iter(values.values())).shape[3]
    if G == 0 or H % G:
        raise ValueError(f"q has {H} heads: must be a multiple of the {G} KV heads")
    for wanted, tensors in (((B, S, G, Dk), keys), ((B, S, G, Dv), values)):
        for name, tensor in tensors.items():
            _check_one(name, tensor, wanted, q)


def _check_dimensions(tensors: dict[str, torch.Tensor], last: str = "width") -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name} is {type(tensor).__name__}: must be a tensor")
        if tensor.dim() != 4:
            shape = tuple(tensor.shape)
            raise ValueError(f"{name} has shape {shape}: must have 4 dimensions, [batch, tokens, heads, {last}]")


def _check_one(name: str, tensor: torch.Tensor, shape: tuple[int, ...], q: torch.Tensor) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}: must be {shape}")
    if tensor.device != q.device:
        raise ValueError(f"{name} is on {tensor.device}: must be on {q.device}, as q is")
    if tensor.dtype != q.dtype and name != "gates":
        raise ValueError(f"{name} is {tensor.dtype}: must be {q.dtype}, as q is")


def check_hidden(x: torch.Tensor, dim: int) -> None:
    """Raise ValueError where x is not [B, S, dim]."""
    if x.dim() != 3 or x.shape[2] != dim:
        raise ValueError(f"x has shape {tuple(x.shape)}: must be [batch, tokens, {dim}]")
