"""The selected branch on a CPU: causal where all blocks are chosen, then block by block the queries that chose it.

See `nsa.kernels.cpu`, whose pieces this is made of. Block 0, a query's own block and the one before are always chosen
(paper, section 4.1), so they need no list: they are one product with a mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from nsa.kernels.blocks import selected_visible, wide
from nsa.kernels.cpu import (
    AT_ONCE,
    Tensors3,
    _backward,
    _forward,
    _merge,
    _rows,
    _same_width,
    _unrows,
    sliding_backward,
    sliding_forward,
)  # fmt: skip

QUERIES_AT_ONCE = 2048  # what is gathered and merged again and again shall stay in the cache
LIST_ROWS = 768  # of a block's list in one product: from there on torch's kernel takes its longest steps


@dataclass(frozen=True, slots=True)
class Chunk:
    """Queries first ... end - 1, whole selection blocks but for the last one; B, G and h as everywhere."""

    B: int
    G: int
    h: int
    first: int
    end: int
    l_sel: int

    @property
    def rows(self) -> int:
        """The number of (b, t, g) rows."""
        return self.B * (self.end - self.first) * self.G

    @property
    def n_blocks(self) -> int:
        return -(-(self.end - self.first) // self.l_sel)

    def by_row(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, H, ...] -> [rows, h, ...]: what the heads of a group have of a query lies in one piece."""
        return x[:, self.first : self.end].reshape(self.rows, self.h, *x.shape[3:])

    def by_block(self, x: torch.Tensor) -> torch.Tensor:
        """Queries, or what goes with them, [B, S, H, ...] -> [B*blocks*G, 1, l_sel*h, ...]."""
        return _rows(self._filled(x).flatten(0, 1), self.h).unsqueeze(1)

    def _filled(self, x: torch.Tensor) -> torch.Tensor:
        part = x[:, self.first : self.end]
        missing = -part.shape[1] % self.l_sel
        if missing:
            part = torch.cat((part, part.new_zeros(self.B, missing, *part.shape[2:])), 1)
        return part.unflatten(1, (-1, self.l_sel))

    def from_blocks(self, x: torch.Tensor) -> torch.Tensor:
        """What `by_block` did, undone: [rows, h, ...]."""
        blocks = _unrows(x.squeeze(1), self.B * self.n_blocks, self.l_sel).unflatten(0, (self.B, self.n_blocks))
        return blocks.flatten(1, 2)[:, : self.end - self.first].reshape(self.rows, self.h, *x.shape[3:])

    def always(self, x: torch.Tensor) -> torch.Tensor:
        """K or V [B, S, G, D]: block 0, the block before, the own one, for each block: [B*blocks*G, 1, 3*l_sel, D]."""
        own = self._filled(x)
        initial = x[:, None, : self.l_sel].expand_as(own)
        before = x[:, self.first - self.l_sel : self.first + (self.n_blocks - 1) * self.l_sel].unflatten(
            1, (-1, self.l_sel)
        )
        return torch.cat((initial, before, own), 2).transpose(2, 3).flatten(0, 2).unsqueeze(1)

    def add_always(self, total: torch.Tensor, part: torch.Tensor) -> None:
        """Add the gradients of `always` to ``total`` [B, S, G, D]."""
        blocks = part.view(self.B, self.n_blocks, self.G, 3, self.l_sel, -1).permute(3, 0, 1, 4, 2, 5)
        total[:, : self.l_sel] += blocks[0].sum(1)
        start = self.first - self.l_sel
        total[:, start : start + self.n_blocks * self.l_sel] += blocks[1].flatten(1, 2)
        total[:, self.first : self.end] += blocks[2].flatten(1, 2)[:, : self.end - self.first]

    def mask(self, like: torch.Tensor) -> torch.Tensor:
        """[1, 1, l_sel*h, 3*l_sel]: 0 where a row sees a key of `always`, else -inf."""
        later = torch.ones(self.l_sel, self.l_sel, dtype=torch.bool, device=like.device).triu(1)
        mask = torch.zeros(self.l_sel, 3 * self.l_sel, dtype=like.dtype, device=like.device)
        mask[:, 2 * self.l_sel :].masked_fill_(later, float("-inf"))
        return mask.repeat_interleave(self.h, 0)[None, None]


@dataclass(frozen=True, slots=True)
class Tile:
    """The queries of a chunk that chose one block of keys beyond those that all have, in lists of equal length.

    rows [B*G*T, m] are their rows in the chunk; where a group has fewer than others, one past the last row.
    """

    start: int
    l_sel: int
    rows: torch.Tensor
    per_group: int

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        """The block of K or V [B, S, G, D] for each of its lists: [B*G*T, 1, l_sel, D]."""
        block = x[:, self.start : self.start + self.l_sel].transpose(1, 2)
        return block.unsqueeze(2).expand(-1, -1, self.per_group, -1, -1).flatten(0, 2).unsqueeze(1)

    def add(self, total: torch.Tensor, part: torch.Tensor) -> None:
        """Add the gradients of `keys` to ``total`` [B, S, G, D]."""
        B, G, D = total.shape[0], total.shape[2], total.shape[3]
        summed = part.view(B, G, self.per_group, self.l_sel, D).sum(2)
        total[:, self.start : self.start + self.l_sel] += summed.transpose(1, 2)


def covered(chosen: torch.Tensor, l_sel: int) -> int:
    """The number of leading tokens, whole blocks of them or all, whose every earlier block is chosen."""
    S = chosen.shape[1]
    own = torch.arange(S, device=chosen.device) // l_sel
    missing = (chosen.sum(-1) != own[None, :, None] + 1).any(2).any(0).nonzero()
    return S if not len(missing) else int(missing[0]) // l_sel * l_sel


def _tiles(chosen: torch.Tensor, chunk: Chunk) -> Iterator[Tile]:
    """The lists of every block. chosen bool [B, S, G, Ns]."""
    n_blocks, groups = chosen.shape[3], chunk.B * chunk.G
    own = torch.arange(chunk.first, chunk.end, device=chosen.device) // chunk.l_sel
    j = torch.arange(n_blocks, device=chosen.device)[:, None]
    listed = (j > 0) & (j < own - 1)
    picks = chosen[:, chunk.first : chunk.end].permute(3, 0, 2, 1).flatten(1, 2) & listed[:, None]  # [Ns, B*G, queries]
    block, group, query = picks.nonzero().unbind(1)
    counts = picks.sum(2)
    starts = counts.flatten().cumsum(0) - counts.flatten()
    rank = torch.arange(len(block), device=chosen.device) - starts[block * groups + group]
    row = (group // chunk.G * (chunk.end - chunk.first) + query) * chunk.G + group % chunk.G
    at = 0
    for number, (n, total) in enumerate(zip(counts.amax(1).tolist(), counts.sum(1).tolist(), strict=True)):
        if not n:
            continue
        per_group = -(-n * chunk.h // LIST_ROWS)
        m = -(-n // per_group)
        rows = row.new_full((groups, per_group * m), chunk.rows)
        rows[group[at : at + total], rank[at : at + total]] = row[at : at + total]
        at += total
        yield Tile(number * chunk.l_sel, chunk.l_sel, rows.view(-1, m), per_group)


def _chunks(q: torch.Tensor, k: torch.Tensor, first: int, l_sel: int) -> Iterator[Chunk]:
    step = max(1, QUERIES_AT_ONCE // l_sel) * l_sel
    for at in range(first, q.shape[1], step):
        G = k.shape[2]
        yield Chunk(q.shape[0], G, q.shape[2] // G, at, min(at + step, q.shape[1]), l_sel)


def _chosen_mask(chosen: torch.Tensor, l_sel: int, h: int, like: torch.Tensor) -> torch.Tensor:
    """[B*G, 1, S*h, S]: 0 where a row sees a token, else -inf."""
    visible = selected_visible(chosen, l_sel).flatten(0, 1)  # [B*G, S, S]
    mask = torch.zeros(visible.shape, dtype=like.dtype, device=like.device).masked_fill_(~visible, float("-inf"))
    return mask.repeat_interleave(h, 1).unsqueeze(1)


def _all_keys(x: torch.Tensor) -> torch.Tensor:
    """K or V [B, S, G, D] -> [B*G, 1, S, D]."""
    return x.transpose(1, 2).flatten(0, 1).unsqueeze(1)


def selected_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chosen: torch.Tensor, l_sel: int, n_sel: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention over the chosen blocks' tokens. chosen bool [B, S, G, Ns], as `blocks.select` makes it.

    Output [B, S, H, Dv] and log-sum-exp [B, S, H].
    """
    B, S, H, _ = q.shape
    d_v, dtype = v.shape[-1], wide(q.dtype)
    if S <= AT_ONCE:
        h = H // k.shape[2]
        q, k, v = _same_width(q, k, v)
        mask = _chosen_mask(chosen, l_sel, h, q)
        found = _forward(_rows(q, h).unsqueeze(1), _all_keys(k), _all_keys(v), 0.0, False, attn_mask=mask, scale=scale)
        return _unrows(found[0].squeeze(1), B, S)[..., :d_v], _unrows(found[1].squeeze(1), B, S)
    out, lse = q.new_empty(B, S, H, d_v), q.new_empty(B, S, H, dtype=dtype)
    first = covered(chosen, l_sel)
    if first:  # a window of all tokens is causal attention
        out[:, :first], lse[:, :first] = sliding_forward(q[:, :first], k[:, :first], v[:, :first], first, scale)
    q, k, v = _same_width(q, k, v)
    for chunk in _chunks(q, k, first, l_sel):
        found = _forward(
            chunk.by_block(q), chunk.always(k), chunk.always(v), 0.0, False, attn_mask=chunk.mask(q), scale=scale
        )
        # One row more than there are: what fills up a list lands there.
        rows, rows_lse = (
            torch.cat((chunk.from_blocks(x).to(dtype), x.new_zeros(1, chunk.h, *x.shape[3:], dtype=dtype)))
            for x in found
        )
        q_rows = chunk.by_row(q)
        for tile in _tiles(chosen, chunk):
            flat = tile.rows.flatten()
            queries = q_rows.index_select(0, flat.clamp(max=chunk.rows - 1)).view(len(tile.rows), 1, -1, q.shape[-1])
            more, more_lse = _forward(queries, tile.keys(k), tile.keys(v), 0.0, False, scale=scale)
            merged, merged_lse = rows.index_select(0, flat), rows_lse.index_select(0, flat)
            _merge(merged, merged_lse, more.reshape(merged.shape), more_lse.reshape(merged_lse.shape))
            rows.index_copy_(0, flat, merged)
            rows_lse.index_copy_(0, flat, merged_lse)
        out[:, chunk.first : chunk.end] = rows[:-1, :, :d_v].view(B, -1, H, d_v)
        lse[:, chunk.first : chunk.end] = rows_lse[:-1].view(B, -1, H)
    return out, lse


def selected_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    chosen: torch.Tensor, l_sel: int, n_sel: int, scale: float,
) -> Tensors3:  # fmt: skip
    """Gradients of q, k and v; the selection has none."""
    B, S, H, d_k = q.shape
    d_v, dtype = v.shape[-1], wide(q.dtype)
    if S <= AT_ONCE:
        G = k.shape[2]
        grad, q, k, v, out = _same_width(grad, q, k, v, out)
        rows = [_rows(x, H // G).unsqueeze(1) for x in (grad, q, out, lse)]
        found = _backward(
            rows[0], rows[1], _all_keys(k), _all_keys(v), rows[2], rows[3], 0.0, False,
            attn_mask=_chosen_mask(chosen, l_sel, H // G, q), scale=scale,
        )  # fmt: skip
        dk, dv = (x.squeeze(1).unflatten(0, (B, G)).transpose(1, 2) for x in found[1:])
        return _unrows(found[0].squeeze(1), B, S)[..., :d_k], dk[..., :d_k], dv[..., :d_v]
    first = covered(chosen, l_sel)
    dq = torch.empty_like(q)
    dk, dv = torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype)
    if first:
        start = slice(0, first)
        dq[:, start], dk[:, start], dv[:, start] = sliding_backward(
            grad[:, start], q[:, start], k[:, start], v[:, start], out[:, start], lse[:, start], first, scale
        )
    grad, q, k, v, out = _same_width(grad, q, k, v, out)
    dk, dv = _same_width(dk, dv, q)[:2]
    for chunk in _chunks(q, k, first, l_sel):
        found = _backward(
            chunk.by_block(grad), chunk.by_block(q), chunk.always(k), chunk.always(v), chunk.by_block(out),
            chunk.by_block(lse), 0.0, False, attn_mask=chunk.mask(q), scale=scale,
        )  # fmt: skip
        chunk.add_always(dk, found[1])
        chunk.add_always(dv, found[2])
        rows = chunk.from_blocks(found[0]).to(dtype)
        rows = torch.cat((rows, torch.zeros_like(rows[:1])))
        q_rows, out_rows, lse_rows, grad_rows = (chunk.by_row(x) for x in (q, out, lse, grad))
        # What fills up a list has no gradient, and a probability of 0 whatever its scores.
        grad_rows = torch.cat((grad_rows, torch.zeros_like(grad_rows[:1])))
        lse_rows = torch.cat((lse_rows, torch.full_like(lse_rows[:1], float("inf"))))
        for tile in _tiles(chosen, chunk):
            flat = tile.rows.flatten()
            there = flat.clamp(max=chunk.rows - 1)
            shape = (len(tile.rows), 1, -1, q.shape[-1])
            found = _backward(
                grad_rows.index_select(0, flat).view(shape), q_rows.index_select(0, there).view(shape),
                tile.keys(k), tile.keys(v), out_rows.index_select(0, there).view(shape),
                lse_rows.index_select(0, flat).view(shape[:-1]), 0.0, False, scale=scale,
            )  # fmt: skip
            summed = rows.index_select(0, flat)
            rows.index_copy_(0, flat, summed.add_(found[0].reshape(summed.shape)))
            tile.add(dk, found[1])
            tile.add(dv, found[2])
        dq[:, chunk.first : chunk.end] = rows[:-1, :, :d_k].view(B, -1, H, d_k)
    return dq, dk[..., :d_k].to(q.dtype), dv[..., :d_v].to(q.dtype)
