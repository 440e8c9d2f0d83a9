"""Calls of the kernels that find the blocks of the selected branch: their importance, and picks of the most important ones.

Layouts as in `branches`; picks int32 [T, G, n_sel], -1 where a query has no more.
"""

from typing import NamedTuple

import torch
import triton

from nsa.kernels import blocks
from nsa.kernels.triton import importance, pick_blocks
from nsa.kernels.triton.branches import Places, sequence_arguments
from nsa.kernels.triton.launch import LOG2E, can_describe, descriptors, launch, meta, rows_for
from nsa.kernels.triton.selection_schedule import LEAST_PAD, Selection
from nsa.kernels.triton.sequences import Range, Sequences
from nsa.kernels.triton.tiles import tile, widths


class Steps(NamedTuple):
    """How importance goes over blocks: so many at once, in how many tiles of keys, and whether whole tiles need no masks."""

    blocks: int
    tiles: int
    is_clear: bool


def steps_of(bn: int, a: int, r: int) -> Steps:
    """Return the steps for tiles of ``bn`` keys, compressed blocks of ``a`` strides and selection blocks of ``r``."""
    most = (bn - (a - 1)) // r
    if most >= 1 and most * r >= a - 1:
        return Steps(most, 1, True)
    count = 8 if 8 * r + a - 1 <= 8 * bn else 1
    return Steps(count, triton.cdiv(count * r + a - 1, bn), False)


def block_importance(
    q: torch.Tensor, k: torch.Tensor, d_v: int, lse: torch.Tensor, sequences: Sequences, at: Range, places: Places,
    selection: Selection, l: int, scale: float, out: torch.Tensor,
) -> None:  # fmt: skip
    """Write the importance [queries of ``at``, G, blocks] from the compressed branch's log-sum-exp; nothing behind a query's
    own.
    """
    G, h = k.shape[1], q.shape[1] // k.shape[1]
    a, r = l // places.stride, selection.l_sel // places.stride
    table, longest, most_keys, H, _, _ = sequence_arguments(sequences, q, k)
    table = table if at.table is None else at.table
    t = tile("importance", q, d_v, sequences.longest)
    bm, by_tma = rows_for(t, h), can_describe(t, k)
    steps = steps_of(t.bn, a, r)
    launch(
        importance.block_importance, (triton.cdiv(at.hi - at.lo, bm // h) * at.count * G,), q, q, k,
        *descriptors(k, t.bn, by_tma), lse, out, table, longest, most_keys, H, G, at.count * G, at.lo, at.hi, at.first,
        selection.n_blocks, scale * LOG2E, STRIDE=places.stride, OFFSET=places.offset, A=a, R=r, h=h, BM=bm, BN=t.bn,
        BJ=max(16, triton.next_power_of_2(steps.blocks)), STEP=steps.blocks, INNER=steps.tiles, CLEAR=steps.is_clear,
        NQ=max(16, triton.next_power_of_2(bm // h)), TMA=by_tma, PACKED=at.table is not None,
        DK=widths(q.shape[-1]), **meta(t),
    )  # fmt: skip


def select_blocks(
    importance: torch.Tensor, picks: torch.Tensor, sequences: Sequences, at: Range, selection: Selection
) -> None:
    """Write the picks int32 [T, G, n_sel] of the queries of ``at``, whose importance is [queries, G, blocks]."""
    pad = max(LEAST_PAD, triton.next_power_of_2(max(selection.n_blocks, selection.n_sel)))
    launch(
        pick_blocks.select_blocks, (at.tokens * picks.shape[1],), picks, importance, picks,
        picks if sequences.positions is None else sequences.positions, sequences.longest, picks.shape[1], at.first,
        selection.n_blocks, n_sel=selection.n_sel, L_SEL=selection.l_sel, LOCAL=blocks.NUM_LOCAL, PAD=pad,
        PACKED=sequences.is_packed, num_warps=1 if pad <= 512 else 2,
    )  # fmt: skip
