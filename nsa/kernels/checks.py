"""What the arguments of attention calls must be: each refusal is one line that names the argument."""

from collections.abc import Sequence
from itertools import pairwise

import torch

from nsa.sizes import KV


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


def check_inputs(q: torch.Tensor, cmp: KV, sel: KV, win: KV, gates: torch.Tensor) -> None:
    """Raise ValueError for an argument of `nsa_attention` that has another shape, device or dtype than q asks of it."""
    keys = {"k_sel": sel.k, "k_win": win.k, "k_cmp": cmp.k}
    values = {"v_sel": sel.v, "v_win": win.v, "v_cmp": cmp.v}
    for name, tensor in {"q": q, **keys, **values, "gates": gates}.items():
        check_dimensions(name, tensor, "3" if name == "gates" else "width")
    if not q.is_floating_point():
        raise ValueError(f"q is {q.dtype}: must be a floating point dtype")
    B, S, H, Dk = q.shape
    n_cmp, G, Dv = cmp.k.shape[1], sel.k.shape[2], sel.v.shape[3]
    if G == 0 or H % G:
        raise ValueError(f"q has {H} heads: must be a multiple of the {G} KV heads")
    for name, tensor in {**keys, **values}.items():
        tokens, width = n_cmp if name.endswith("cmp") else S, Dk if name in keys else Dv
        _check_one(name, tensor, (B, tokens, G, width), q)
    _check_one("gates", gates, (B, S, H, 3), q)


def check_dimensions(name: str, tensor: torch.Tensor, last: str = "width") -> None:
    """Raise ValueError for what is no tensor of 4 dimensions."""
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
