"""Calls of the kernels of the selected branch, a function per step: lists of the queries that picked a block, attention.

Layouts as in `branches`; picks int32 [T, G, n_sel], -1 where a query has no more.
"""

from typing import NamedTuple, Self

import torch
import triton

from nsa.kernels import blocks
from nsa.kernels.triton import lists, selection_backward, selection_forward
from nsa.kernels.triton.branches import Pair, Rows
from nsa.kernels.triton.launch import LOG2E, head_dims, launch
from nsa.kernels.triton.sequences import Range, Sequences
from nsa.kernels.triton.tiles import capability, keys_at_once, tile, widths

FEW = 32  # picks, which kernels have room for at any length, -1 behind the last: little is compiled again for another length
ROUND = 16  # blocks, so that rows of their figures are aligned at any length
LEAST_PAD = 128  # blocks that they have room for, for the same reason
Gated = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Selection(NamedTuple):
    """Blocks of l_sel tokens, n_sel of them per query; n_blocks or fewer in a sequence; a program holds sub_block keys of one."""

    l_sel: int
    n_sel: int
    n_blocks: int
    sub_block: int = 64

    @classmethod
    def of(cls, longest: int, l_sel: int, n_sel: int, q: torch.Tensor, d_v: int) -> Self:
        """In sequences of at most ``longest`` tokens, for queries like ``q`` [..., Dk]. More than `FEW` blocks per query only where
        there are as many.
        """
        n_blocks = -(-blocks.num_selection(longest, l_sel) // ROUND) * ROUND
        return cls(
            l_sel,
            n_sel if n_sel <= FEW else min(n_sel, n_blocks),
            n_blocks,
            keys_at_once(l_sel, q.shape[-1], d_v, q.element_size()),
        )

    @property
    def sub_blocks(self) -> int:
        """The sub-blocks of a block."""
        return -(-self.l_sel // self.sub_block)

    @property
    def parts(self) -> int:
        """The parts of a query and head."""
        return self.n_sel * self.sub_blocks

    def settings(self) -> dict[str, int]:
        """Return the sizes as the kernels name them."""
        return {"n_sel": self.n_sel, "L_SEL": self.l_sel, "SUB": self.sub_blocks}


class Items(NamedTuple):
    """Items of work (`lists`): int32 [items, 4], and where each block's begin, [sequences * G, blocks + 1]."""

    items: torch.Tensor
    starts: torch.Tensor


# --- lists -------------------------------------------------------------------------------------------------------------


def _pads(selection: Selection, sequences: Sequences) -> dict[str, int]:
    slots = triton.next_power_of_2(selection.n_sel)
    return {"CH": sequences.chunk, "NS": slots, "NB": max(LEAST_PAD, triton.next_power_of_2(selection.n_blocks + 1))}


def make_lists(
    picks: torch.Tensor, entries: torch.Tensor, totals: torch.Tensor, sequences: Sequences, at: Range, selection: Selection,
    piece: int,
) -> Items:  # fmt: skip
    """Write the lists of a range: ``entries`` int32 [queries * G * n_sel], ``totals`` [sequences * G, blocks]; returns their
    items.
    """
    G, n_blocks, groups = picks.shape[1], selection.n_blocks, at.count * picks.shape[1]
    table = picks if at.table is None else at.table
    counts = picks.new_empty(at.all_chunks * G * n_blocks)
    found = _room(picks, at, selection, piece)
    packed, pads = at.table is not None, _pads(selection, sequences)
    longest = sequences.longest
    launch(
        lists.count_picks, (groups, at.chunks), picks, picks, counts, table, longest, G, at.lo, at.hi, at.chunks, n_blocks,
        n_sel=selection.n_sel, **pads, PACKED=packed, num_warps=4,
    )  # fmt: skip
    launch(
        lists.scan_counts, (groups, triton.cdiv(n_blocks, 32)), picks, counts, totals, table, G, at.lo, at.hi, at.chunks, n_blocks,
        CH=sequences.chunk, CC=64, BJ=32, PACKED=packed, num_warps=4,
    )  # fmt: skip
    launch(
        lists.place_entries, (groups, at.chunks), picks, picks, counts, totals, entries, *found, table, longest, G, at.lo, at.hi,
        at.first, at.chunks, n_blocks, piece, n_sel=selection.n_sel, L_SEL=selection.l_sel, **pads, BIG=1 << 30, PACKED=packed,
        num_warps=4,
    )  # fmt: skip
    return found


def cut_lists(
    picks: torch.Tensor, totals: torch.Tensor, sequences: Sequences, at: Range, selection: Selection, piece: int
) -> Items:
    """Return items of another size from the ``totals`` that `make_lists` wrote."""
    G, found = picks.shape[1], _room(picks, at, selection, piece)
    table = picks if at.table is None else at.table
    launch(
        lists.cut_lists, (at.count * G, min(32, at.chunks)), picks, totals, *found, table, sequences.longest, G, at.lo, at.hi,
        at.first, selection.n_blocks, piece, n_sel=selection.n_sel, L_SEL=selection.l_sel, NB=_pads(selection, sequences)["NB"],
        PACKED=at.table is not None, num_warps=4,
    )  # fmt: skip
    return found


def _room(picks: torch.Tensor, at: Range, selection: Selection, piece: int) -> Items:
    groups = at.count * picks.shape[1]
    most = at.tokens * picks.shape[1] * selection.n_sel // piece + picks.shape[1] * at.rooms
    return Items(picks.new_empty(most, 4), picks.new_empty(groups, selection.n_blocks + 1))


def piece_of(h: int) -> int:
    """Return the queries of an item in the forward: about a thousand rows."""
    return max(16, triton.next_power_of_2(1024 // h // 2 + 1))


BACKWARD_PIECE = 256  # queries of an item there, whose dk and dv are parts in memory


# --- the selected branch ----------------------------------------------------------------------------------------------


def parts_bytes(q: torch.Tensor, d_v: int, selection: Selection) -> int:
    """Return the bytes of a token's parts, in the forward or the backward, whichever has more."""
    return q.shape[1] * selection.parts * (max(q.shape[-1], d_v) * q.element_size() + 4)


def _is_wide(q: torch.Tensor, v: torch.Tensor, sequences: Sequences, at: Range, selection: Selection) -> bool:
    """Return whether places inside a sequence, or among the parts of ``at``, need 64 bits."""
    rows = max(sequences.longest, at.tokens * selection.parts)
    return rows * q.shape[1] * max(q.shape[-1], v.shape[-1]) >= 1 << 31


def _has_wgmma(q: torch.Tensor) -> bool:
    """Return whether products of q are Hopper's, which read both operands from shared memory."""
    return capability(q.device).startswith("sm_9") and q.element_size() == 2


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, picks: torch.Tensor, entries: torch.Tensor, totals: torch.Tensor,
    sequences: Sequences, at: Range, selection: Selection, scale: float, out: torch.Tensor, lse: torch.Tensor,
    gated: Gated | None = None,
) -> None:  # fmt: skip
    """Write output and log-sum-exp of the selected branch of the queries of ``at``; given (o_cmp, o_win, gates, total), the
    gated sum to the last (Eq. 5); and the lists of their picks (`make_lists`).
    """
    G = k.shape[1]
    items = make_lists(picks, entries, totals, sequences, at, selection, piece_of(q.shape[1] // G))
    parts = selected_forward(q, k, v, entries, items, sequences, at, selection, scale)
    merge_parts(parts, picks, out, lse, G, at, selection, gated)


def selected_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, entries: torch.Tensor, items: Items, sequences: Sequences, at: Range,
    selection: Selection, scale: float,
) -> Pair:  # fmt: skip
    """Return parts of the queries of ``at`` and their log-sum-exps."""
    H, G = q.shape[1], k.shape[1]
    parts = q.new_empty(at.tokens * H * selection.parts, v.shape[-1])
    lse = q.new_empty(at.tokens * H * selection.parts, dtype=torch.float32)
    t = tile("selected", q, v.shape[-1], sequences.longest)
    launch(
        selection_forward.selected_forward, (len(items.items), selection.sub_blocks), q, q, k, v, entries, items.items, parts, lse,
        q if at.table is None else at.table, sequences.longest, H, G, at.first, scale * LOG2E, **selection.settings(), h=H // G,
        BM=t.bm, BN=selection.sub_block, STAGES=t.stages, AHEAD=_has_wgmma(q), WIDE=_is_wide(q, v, sequences, at, selection),
        PACKED=at.table is not None, **head_dims(q.shape[-1], v.shape[-1]), num_warps=t.warps,
    )  # fmt: skip
    return parts, lse


def merge_parts(
    parts: Pair, picks: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, groups: int, at: Range, selection: Selection,
    gated: Gated | None,
) -> None:  # fmt: skip
    """Write what `attend` does, from the parts."""
    H, d_v = out.shape[1:]
    h, part = H // groups, widths(d_v)
    heads = triton.next_power_of_2(h)
    o_cmp, o_win, gates, total = (out, out, out, out) if gated is None else gated
    launch(
        selection_forward.merge_parts, (at.tokens * groups,), out, *parts, out, lse, o_cmp, o_win, gates, total, picks, H, groups,
        at.first, n_sel=selection.n_sel, SUB=selection.sub_blocks, h=h, DV=widths(d_v), HP=heads,
        NS=triton.next_power_of_2(selection.n_sel), NP=triton.next_power_of_2(selection.parts), GATED=gated is not None,
        num_warps=max(2, min(8, heads * part.whole // 512)),
    )  # fmt: skip


def selected_gradients(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows, picks: torch.Tensor,
    entries: torch.Tensor, items: Items, dq: torch.Tensor, d_keys: Pair,
    sequences: Sequences, at: Range, selection: Selection, scale: float, *, add_dq: bool, add_keys: bool,
) -> None:  # fmt: skip
    """Write, or add, what the queries of ``at`` give: to ``dq``, and to the gradients of k and v, ``d_keys``.

    ``d_keys`` are float32 where several ranges add to them.
    """
    H, G, d_k, d_v = q.shape[1], k.shape[1], q.shape[-1], v.shape[-1]
    h, table = H // G, q if at.table is None else at.table
    t = tile("selected_backward", q, d_v, sequences.longest)
    part_dq = q.new_empty(at.tokens * H * selection.parts, d_k)
    keys_of_items = len(items.items) * selection.sub_blocks * selection.sub_block
    part_k = q.new_empty(keys_of_items, d_k, dtype=torch.float32)
    part_v = q.new_empty(keys_of_items, d_v, dtype=torch.float32)
    launch(
        selection_backward.selected_backward, (len(items.items), selection.sub_blocks), q, q, k, v, grad, *rows, entries,
        items.items, part_dq, part_k, part_v, table, sequences.longest, H, G, at.first, scale * LOG2E, scale,
        **selection.settings(), h=h, BM=t.bm, BN=selection.sub_block, STAGES=t.stages, TRANSPOSED=_has_wgmma(q),
        WIDE=_is_wide(q, v, sequences, at, selection), PACKED=at.table is not None, **head_dims(d_k, d_v), num_warps=t.warps,
    )  # fmt: skip
    keys = min(16, selection.sub_block)
    launch(
        selection_backward.sum_items, (at.count * G * selection.n_blocks, triton.cdiv(selection.l_sel, keys)), q, part_k, part_v,
        items.starts, *d_keys, table, sequences.longest, G, selection.n_blocks, L_SEL=selection.l_sel, SUB=selection.sub_blocks,
        BN=selection.sub_block, DK=widths(d_k), DV=widths(d_v), BR=keys, ADD=add_keys, PACKED=at.table is not None, num_warps=4,
    )  # fmt: skip
    width = h * d_k
    block = min(1024, triton.next_power_of_2(width))
    launch(
        selection_backward.merge_dq, (at.tokens * G, triton.cdiv(width, block)), q, part_dq, dq, picks, G, at.first,
        n_sel=selection.n_sel, SUB=selection.sub_blocks, NS=triton.next_power_of_2(selection.n_sel), WIDTH=width, BLOCK=block,
        ADD=add_dq, num_warps=4,
    )  # fmt: skip
