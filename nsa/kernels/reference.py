"""NSA by the equations: dense scores, explicit masks, any float dtype. Slow, and the truth for every other backend.

Shapes: B batch, S tokens, H query heads, G KV groups, h = H/G heads a group, Nc compressed blocks, Ns selection blocks.
"""

import torch

from nsa.kernels import blocks
from nsa.kernels.blocks import select, wide, without_autocast
from nsa.sizes import BRANCHES, Branch

__all__ = ["compressed", "gated_sum", "probabilities", "select", "selected", "sliding", "weighted"]


def probabilities(q: torch.Tensor, k: torch.Tensor, visible: torch.Tensor, scale: float) -> torch.Tensor:
    """Softmax over visible keys, zero (not NaN) for a query that sees none. [B, G, h, S, N], float32 for the half types.

    q [B, S, H, Dk], k [B, N, G, Dk], visible bool broadcastable to [B, G, 1, S, N].
    """
    q, k = q.to(wide(q.dtype)), k.to(wide(k.dtype))
    B, S, H, Dk = q.shape
    G = k.shape[2]
    grouped = q.reshape(B, S, G, H // G, Dk)
    with without_autocast(q.device):
        scores = torch.einsum("bsghd,bngd->bghsn", grouped, k) * scale
    if k.shape[1] == 0:
        return scores
    some = visible.any(-1, keepdim=True)
    # A row without keys keeps finite scores, so that neither softmax nor its gradient meets inf - inf.
    weights = scores.masked_fill(~visible & some, float("-inf")).softmax(-1)
    # Not times zero: a NaN in a key that they do not see stays away from them.
    return weights.masked_fill(~some, 0.0)


def weighted(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return [B, S, H, Dv] from p [B, G, h, S, N] and v [B, N, G, Dv], in v's dtype."""
    with without_autocast(v.device):
        out = torch.einsum("bghsn,bngd->bsghd", p, v.to(p.dtype))
    return out.flatten(2, 3).to(v.dtype)


def compressed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, l: int, d: int, l_sel: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the compressed branch and the importance that it gives to selection blocks.

    q [B, S, H, Dk], k [B, Nc, G, Dk], v [B, Nc, G, Dv] -> output [B, S, H, Dv] and importance
    [B, S, G, Ns] (Eq. 8 to 10), the latter without gradient.
    """
    S, n_cmp = q.shape[1], k.shape[1]
    visible = blocks.compressed_visible(S, n_cmp, l, d, q.device)
    p = probabilities(q, k, visible, scale)
    n_blocks = blocks.num_selection(S, l_sel)
    with torch.no_grad():
        shared = blocks.overlap(n_cmp, n_blocks, l, d, l_sel, q.device, p.dtype)
        with without_autocast(q.device):
            importance = (p.sum(2) @ shared).transpose(1, 2)
    return weighted(p, v), importance


def selected(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chosen: torch.Tensor, *, l_sel: int, n_sel: int, scale: float
) -> torch.Tensor:
    """Causal attention over the tokens of the chosen blocks. k [B, S, G, Dk], chosen bool [B, S, G, Ns]."""
    visible = blocks.selected_visible(chosen, l_sel)[:, :, None]
    return weighted(probabilities(q, k, visible, scale), v)


def sliding(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, w: int, scale: float) -> torch.Tensor:
    """Attention over the last ``w`` tokens, the query's own included."""
    visible = blocks.window_visible(q.shape[1], w, q.device)
    return weighted(probabilities(q, k, visible, scale), v)


def gated_sum(out: dict[Branch, torch.Tensor], gates: torch.Tensor) -> torch.Tensor:
    """Eq. 5: gates [B, S, H, 3] times the branches' outputs [B, S, H, Dv], summed."""
    g = dict(zip(BRANCHES, gates.unsqueeze(-1).unbind(-2), strict=True))
    total = g["cmp"] * out["cmp"]
    branch: Branch
    for branch in ("sel", "win"):
        total = torch.addcmul(total, g[branch], out[branch])
    return total
