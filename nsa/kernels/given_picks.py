"""The selected branch over blocks that the caller picked, without the other branches and gates."""

from __future__ import annotations

import torch

from nsa.kernels import blocks
from nsa.kernels.checks import check_tensors
from nsa.kernels.dispatch import choose, nothing
from nsa.sizes import check_sizes


def selected_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    picks: torch.Tensor,
    *,
    select_block: int = 64,
    scale: float | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Causal attention over blocks of ``select_block`` tokens that the caller picked for each query and KV group.

    Args:
        q: [B, S, H, Dk]; query head i belongs to KV group i // (H/G).
        k, v: [B, S, G, Dk] and [B, S, G, Dv].
        picks: numbers of blocks, int [B, S, G, n], or a mask, bool [B, S, G, ceil(S / select_block)]. A number may be there twice;
            below zero, and after the query's own block, it has no effect. No block is added: not the first, not the query's own.
        scale: of the scores; 1/sqrt(Dk) when None.
        backend: as in `nsa_attention`. On a GPU a mask is read on the host, once, for the most blocks that a query has.

    Returns: [B, S, H, Dv], zero for a query that sees no token. Picks have no gradient. Raises ValueError naming the argument that
    does not fit.
    """
    check_sizes(select_block=select_block)
    check_tensors(q, {"k": k}, {"v": v})
    B, S, _, Dk = q.shape
    l_sel = select_block
    G, n_blocks = k.shape[2], blocks.num_selection(S, l_sel)
    if picks.dim() != 4 or tuple(picks.shape[:3]) != (B, S, G):
        raise ValueError(f"picks has shape {tuple(picks.shape)}: must be {(B, S, G)} and the picks of each")
    if picks.is_floating_point() or picks.is_complex():
        raise ValueError(f"picks is {picks.dtype}: must be whole numbers of blocks, or bool")
    if picks.dtype == torch.bool and picks.shape[3] != n_blocks:
        raise ValueError(f"picks is a mask of {picks.shape[3]} blocks: S={S} has {n_blocks} of select_block={l_sel}")
    if picks.device != q.device:
        raise ValueError(f"picks is on {picks.device}: must be on {q.device}, as q is")
    row = choose(backend, q.dtype, q.device, Dk, v.shape[3])
    if q.numel() == 0 or picks.shape[3] == 0:
        return nothing(q, k, v)
    chosen = picks if picks.dtype == torch.bool else _mask(picks, n_blocks)
    own = torch.arange(S, device=q.device)[:, None] // l_sel
    chosen = chosen & (torch.arange(n_blocks, device=q.device) <= own)[None, :, None]
    most = min(picks.shape[3], n_blocks) if picks.dtype != torch.bool or not q.is_cuda else int(chosen.sum(-1).max())
    scale = Dk**-0.5 if scale is None else scale
    return row.branches.selected(q, k, v, chosen, l_sel=l_sel, n_sel=max(1, most), scale=scale)


def _mask(picks: torch.Tensor, n_blocks: int) -> torch.Tensor:
    """Return bool [B, S, G, n_blocks] of numbers [B, S, G, n]; those that no block has set nothing."""
    picks = picks.long()  # before they meet a number of blocks that a narrow dtype may not hold
    places = torch.where((picks < 0) | (picks >= n_blocks), n_blocks, picks)
    return picks.new_zeros(*picks.shape[:3], n_blocks + 1, dtype=torch.bool).scatter(-1, places, True)[..., :n_blocks]
