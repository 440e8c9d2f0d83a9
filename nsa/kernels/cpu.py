"""The three branches on a CPU, forward and backward, from PyTorch's own kernels: its blocked attention and its products.

Torch's attention for CPUs also returns the log-sum-exp of each row's scores. Attentions over disjoint keys are merged by it
(FlashAttention, arXiv 2205.14135, section 3.1), and its backward, given the merged output and log-sum-exp, returns each part's
exact share of the gradients. So nothing of S x S is kept, and no block that is masked whole is computed:

- window: tiles of queries, each against all the keys that any of its queries sees, under one mask;
- compression: chunks of queries, their scores summed to selection blocks on the way, recomputed in backward;
- selection: causal while every block is chosen; from there on, for each block of keys, the list of the queries that chose it.
  A block's gradient comes from one product over its list: no atomics, the same bits every time.

Shapes: B batch, S tokens, H query heads, G KV groups, h = H/G, D head dim, Nc compressed and Ns selection blocks; q [B, S, H, Dk],
k [B, S, G, Dk], v [B, S, G, Dv]. The log-sum-exp is [B, S, H], float32, or float64 for float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from nsa.kernels import blocks
from nsa.kernels.blocks import wide

CMP_CHUNK = 256  # queries, whose scores stay in the cache
TILE = 64  # queries of a window's tile; with the heads of a group, rows enough for torch's kernel
TILES_AT_ONCE = 8
AT_ONCE = 256  # tokens; up to there one product under a mask costs less than the calls that many would

Tensors3 = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _merge(out: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor) -> None:
    """Take the attention over further keys into ``out`` [..., D] and ``lse`` [...], in place."""
    total = torch.logaddexp(lse, more_lse)
    out.mul_((lse - total).exp_().unsqueeze(-1)).addcmul_(more.to(out.dtype), (more_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)


def _widened(x: torch.Tensor, width: int) -> torch.Tensor:
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x


def _same_width(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Torch's kernel wants Dk = Dv: the narrower ones are widened with zeros, which add nothing."""
    width = max(t.shape[-1] for t in tensors)
    return tuple(_widened(t, width) for t in tensors)


# --- the window -------------------------------------------------------------------------------------------------------


def _rows(x: torch.Tensor, h: int) -> torch.Tensor:
    """[B, c, H, ...] -> [B*G, c*h, ...]: the heads of a group below each other, as they share K and V."""
    return x.unflatten(2, (-1, h)).transpose(1, 2).flatten(2, 3).flatten(0, 1)


def _unrows(x: torch.Tensor, B: int, c: int) -> torch.Tensor:
    """What `_rows` did, undone: [B*G, c*h, ...] -> [B, c, H, ...]."""
    return x.unflatten(1, (c, -1)).unflatten(0, (B, -1)).transpose(1, 2).flatten(2, 3)


@dataclass(frozen=True, slots=True)
class Band:
    """Query tiles of equal length and the keys that each sees: tile i has queries at + i*b ..., keys from + i*b ...."""

    at: int
    tiles: int
    b: int  # queries a tile
    first: int  # key of the first tile
    keys: int  # a tile

    @property
    def queries(self) -> slice:
        return slice(self.at, self.at + self.tiles * self.b)


def _bands(S: int, w: int) -> Iterator[Band]:
    """Tiles of TILE queries: one by one while their keys begin at 0, then several at once, then what is left."""
    if S <= AT_ONCE:
        yield Band(0, 1, S, 0, S)
        return
    back = -(-(w - 1) // TILE) * TILE  # keys before a tile that any of its queries may see, in whole tiles
    at = 0
    while at < S:
        first = max(0, at - back)
        whole = (S - at) // TILE if at >= back else min(1, (S - at) // TILE)
        tiles, b = (min(whole, TILES_AT_ONCE), TILE) if whole else (1, S - at)
        yield Band(at, tiles, b, first, at + b - first)
        at += tiles * b


def _mask(band: Band, w: int, h: int, like: torch.Tensor) -> torch.Tensor:
    """[b*h, keys]: 0 where a row sees a key, else -inf; the same for all tiles."""
    i = torch.arange(band.b, device=like.device)[:, None] + (band.at - band.first)
    back = i - torch.arange(band.keys, device=like.device)[None, :]
    mask = torch.zeros(band.b, band.keys, dtype=like.dtype).masked_fill_((back < 0) | (back >= w), float("-inf"))
    return mask.repeat_interleave(h, 0)[None, None]


def _query_tiles(x: torch.Tensor, band: Band, h: int) -> torch.Tensor:
    """Queries, or what goes with them, [B, S, H, ...] -> [B*tiles*G, 1, b*h, ...]."""
    part = x[:, band.queries].unflatten(1, (band.tiles, band.b)).flatten(0, 1)
    return _rows(part, h).unsqueeze(1)


def _key_tiles(x: torch.Tensor, band: Band) -> torch.Tensor:
    """K or V by group [B, G, S, D] -> [B*tiles*G, 1, keys, D]."""
    end = band.first + (band.tiles - 1) * band.b + band.keys
    windows = x[:, :, band.first : end].unfold(2, band.keys, band.b)  # [B, G, tiles, D, keys]
    return windows.permute(0, 2, 1, 4, 3).flatten(0, 2).unsqueeze(1)


def _from_tiles(x: torch.Tensor, band: Band, B: int) -> torch.Tensor:
    """What `_query_tiles` did, undone: [B, tiles*b, H, ...]."""
    return _unrows(x.squeeze(1), B * band.tiles, band.b).unflatten(0, (B, band.tiles)).flatten(1, 2)


def _add_key_tiles(total: torch.Tensor, part: torch.Tensor, band: Band) -> None:
    """Add the gradients of `_key_tiles`, whose windows overlap, to ``total`` [B, G, S, D]."""
    B, G, _, D = total.shape
    windows = part.view(B, band.tiles, G, band.keys, D).transpose(1, 2)
    if band.tiles == 1:
        total[:, :, band.first : band.first + band.keys] += windows[:, :, 0]
        return
    # Windows lie b apart and are whole tiles long: the same piece of each makes one run.
    for piece in range(band.keys // band.b):
        start = band.first + piece * band.b
        run = windows[:, :, :, piece * band.b : (piece + 1) * band.b].flatten(2, 3)
        total[:, :, start : start + band.tiles * band.b] += run


def _groups_first(x: torch.Tensor) -> torch.Tensor:
    """[B, S, G, D] -> [B, G, S, D], in one piece."""
    return x.transpose(1, 2).contiguous()


def sliding_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, w: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the last ``w`` tokens, the query's own included: output [B, S, H, Dv] and log-sum-exp."""
    B, S, H, _ = q.shape
    h, d_v = H // k.shape[2], v.shape[-1]
    q, k, v = _same_width(q, k, v)
    k, v = _groups_first(k), _groups_first(v)
    out = q.new_empty(B, S, H, d_v)
    lse = q.new_empty(B, S, H, dtype=wide(q.dtype))
    for band in _bands(S, w):
        found, found_lse = _forward(
            _query_tiles(q, band, h), _key_tiles(k, band), _key_tiles(v, band), 0.0, False,
            attn_mask=_mask(band, w, h, q), scale=scale,
        )  # fmt: skip
        out[:, band.queries] = _from_tiles(found, band, B)[..., :d_v]
        lse[:, band.queries] = _from_tiles(found_lse, band, B)
    return out, lse


def sliding_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    w: int, scale: float,
) -> Tensors3:  # fmt: skip
    """Gradients of q, k and v."""
    B, S, H, d_k = q.shape
    h, d_v = H // k.shape[2], v.shape[-1]
    q, k, v = _same_width(q, k, v)
    k, v = _groups_first(k), _groups_first(v)
    dq = q.new_empty(B, S, H, d_k)
    dk, dv = torch.zeros_like(k, dtype=wide(k.dtype)), torch.zeros_like(v, dtype=wide(v.dtype))
    for band in _bands(S, w):
        grad_tiles, out_tiles = (_query_tiles(_widened(t, q.shape[-1]), band, h) for t in (grad, out))
        found = _backward(
            grad_tiles, _query_tiles(q, band, h), _key_tiles(k, band), _key_tiles(v, band), out_tiles,
            _query_tiles(lse, band, h), 0.0, False, attn_mask=_mask(band, w, h, q), scale=scale,
        )  # fmt: skip
        dq[:, band.queries] = _from_tiles(found[0], band, B)[..., :d_k]
        _add_key_tiles(dk, found[1], band)
        _add_key_tiles(dv, found[2], band)
    return dq, dk.transpose(1, 2)[..., :d_k].to(q.dtype), dv.transpose(1, 2)[..., :d_v].to(q.dtype)


# --- the compressed branch --------------------------------------------------------------------------------------------


def _cmp_chunks(
    q: torch.Tensor, k: torch.Tensor, l: int, d: int, scale: float
) -> Iterator[tuple[int, int, int, torch.Tensor, torch.Tensor]]:
    """(first query, end, n, rows, p) of each chunk that sees any of the first n compressed blocks.

    rows [B*G, c*h, Dk] are its queries, the heads of a group together; p [B*G, c*h, n] their probabilities, 0 where a query sees
    no block at all. ``k`` is [B*G, Nc, Dk].
    """
    S, h = q.shape[1], q.shape[0] * q.shape[2] // k.shape[0]
    for at in range(0, S, CMP_CHUNK):
        end = min(at + CMP_CHUNK, S)
        n = min(k.shape[1], max(0, (end - l) // d + 1))
        if n == 0:
            continue
        rows = _rows(q[:, at:end], h).to(k.dtype)
        scores = torch.bmm(rows, k[:, :n].transpose(1, 2)).mul_(scale)
        last = torch.arange(n, device=q.device) * d + (l - 1)
        hidden = last[None, :] > torch.arange(at, end, device=q.device)[:, None]
        by_query = scores.unflatten(1, (end - at, h)).masked_fill_(hidden[:, None], float("-inf"))
        p = by_query.softmax(-1)
        p[:, : max(0, l - 1 - at)] = 0  # a softmax over nothing
        yield at, end, n, rows, p.flatten(1, 2)


def _by_group(x: torch.Tensor) -> torch.Tensor:
    """[B, N, G, D] -> [B*G, N, D] in what is summed in."""
    return x.transpose(1, 2).flatten(0, 1).to(wide(x.dtype)).contiguous()


def compressed_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, l: int, d: int, l_sel: int, scale: float
) -> Tensors3:
    """Attention over the compressed blocks k [B, Nc, G, Dk], v [B, Nc, G, Dv] that are visible (Eq. 7), zero where none is.

    Output [B, S, H, Dv], an empty log-sum-exp (the backward takes the softmax again) and importance [B, S, G, Ns] (Eq. 8 to 10).
    """
    B, S, H, _ = q.shape
    n_cmp, G, d_v = k.shape[1], k.shape[2], v.shape[-1]
    n_blocks = blocks.num_selection(S, l_sel)
    keys, values = _by_group(k), _by_group(v)
    shared = blocks.overlap(n_cmp, n_blocks, l, d, l_sel, q.device, keys.dtype)
    out = q.new_zeros(B, S, H, d_v)
    importance = keys.new_zeros(B, S, G, n_blocks)
    for at, end, n, _, p in _cmp_chunks(q, keys, l, d, scale):
        out[:, at:end] = _unrows(torch.bmm(p, values[:, :n]), B, end - at)
        summed = p.unflatten(1, (end - at, H // G)).sum(2) @ shared[:n]
        importance[:, at:end] = summed.unflatten(0, (B, G)).transpose(1, 2)
    return out, importance.new_empty(0), importance


def compressed_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    l: int, d: int, scale: float,
) -> Tensors3:  # fmt: skip
    """Gradients of q, k and v; the importance has none."""
    B, _, H, _ = q.shape
    G = k.shape[2]
    keys, values = _by_group(k), _by_group(v)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(keys), torch.zeros_like(values)
    for at, end, n, rows, p in _cmp_chunks(q, keys, l, d, scale):
        do, o = (_rows(t[:, at:end], H // G).to(keys.dtype) for t in (grad, out))
        ds = torch.bmm(do, values[:, :n].transpose(1, 2))
        ds.sub_((do * o).sum(-1, keepdim=True)).mul_(p).mul_(scale)
        dq[:, at:end] = _unrows(torch.bmm(ds, keys[:, :n]), B, end - at)
        dk[:, :n].baddbmm_(ds.transpose(1, 2), rows)
        dv[:, :n].baddbmm_(p.transpose(1, 2), do)
    return dq, *(t.unflatten(0, (B, G)).transpose(1, 2).to(q.dtype) for t in (dk, dv))
