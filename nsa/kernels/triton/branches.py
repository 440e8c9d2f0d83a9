"""Calls of the kernels, a function a step: layouts, grids, tiles. `whole` puts them in sequence; `single` serves one branch
alone.

Tensors are flat over tokens, as in `rows`: q [T, H, Dk], k [., G, Dk], v [., G, Dv], outputs [T, H, Dv], log-sum-exp and
delta [T, H] float32; contiguous all.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from nsa.kernels import blocks
from nsa.kernels.triton import gates as gate_kernels
from nsa.kernels.triton import importance, lists, select, selected, selected_backward, strided, strided_backward
from nsa.kernels.triton.launch import LOG2E, can_describe, descriptors, head_dims, launch, meta, of_keys_alone, rows_for
from nsa.kernels.triton.sequences import Range, Sequences
from nsa.kernels.triton.tiles import capability, keys_at_once, tile, widths

Pair = tuple[torch.Tensor, torch.Tensor]

NO_WINDOW = 1 << 30
FEW = 1024  # programs of dk and dv below which queries are cut into segments
MOST_SEGMENTS, LEAST_SEGMENT = 16, 128
NO_GATE = -1


class Places(NamedTuple):
    """Where the keys of a branch lie: key n ends at token n * stride + offset; and how far back a query sees."""

    name: str
    stride: int
    offset: int
    window: int = NO_WINDOW

    @property
    def is_window(self) -> bool:
        return self.window < NO_WINDOW

    def most_keys(self, sequences: Sequences) -> int:
        """Of any sequence."""
        return sequences.longest if self.is_window else sequences.most_keys


def window(w: int) -> Places:
    """The last w tokens."""
    return Places("sliding", 1, 0, w)


def compression(l: int, d: int) -> Places:
    """Blocks of l tokens every d."""
    return Places("compressed", d, l - 1)


class Selection(NamedTuple):
    """Blocks of l_sel tokens, n_sel of them per query; at most n_blocks in a sequence; a program holds sub_block keys of one."""

    l_sel: int
    n_sel: int
    n_blocks: int
    sub_block: int = 64

    @classmethod
    def of(cls, longest: int, l_sel: int, n_sel: int, q: torch.Tensor, d_v: int) -> Selection:
        """In sequences of at most ``longest`` tokens, for queries like ``q`` [..., Dk]; never more blocks per query than there
        are.
        """
        n_blocks = blocks.num_selection(longest, l_sel)
        return cls(l_sel, min(n_sel, n_blocks), n_blocks, keys_at_once(l_sel, q.shape[-1], d_v, q.element_size()))

    @property
    def sub_blocks(self) -> int:
        """Of a block."""
        return -(-self.l_sel // self.sub_block)

    @property
    def parts(self) -> int:
        """Of a query and head."""
        return self.n_sel * self.sub_blocks

    def settings(self) -> dict[str, int]:
        """As the kernels name them."""
        return {"n_sel": self.n_sel, "L_SEL": self.l_sel, "SUB": self.sub_blocks}


class Items(NamedTuple):
    """Items of work (`lists`): int32 [items, 4], and where each block's begin, [sequences * G, blocks + 1]."""

    items: torch.Tensor
    starts: torch.Tensor


def _sequence_arguments(sequences: Sequences, q: torch.Tensor, k: torch.Tensor) -> tuple[Any, ...]:
    H, G = q.shape[1], k.shape[1]
    table = q if sequences.table is None else sequences.table
    return table, sequences.longest, sequences.most_keys, H, G, sequences.count * G


# --- window and compression -------------------------------------------------------------------------------------------


def strided_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences, places: Places, scale: float, out: torch.Tensor,
    lse: torch.Tensor,
) -> None:  # fmt: skip
    """Write output and log-sum-exp of the window or the compressed branch."""
    H, G, h = q.shape[1], k.shape[1], q.shape[1] // k.shape[1]
    t = tile(places.name, q, v.shape[-1], sequences.longest)
    bm, by_tma = rows_for(t, h), can_describe(t, k, v)
    launch(
        strided.strided_forward, (triton.cdiv(sequences.longest, bm // h) * sequences.count * G,), q, q, k, v,
        *descriptors(k, t.bn, by_tma), *descriptors(v, t.bn, by_tma), out, lse, *_sequence_arguments(sequences, q, k),
        places.window, scale * LOG2E, STRIDE=places.stride, OFFSET=places.offset, h=H // G, BM=bm, BN=t.bn, LOOPS=t.loops,
        WINDOWED=places.is_window, TMA=by_tma, PACKED=sequences.is_packed, **head_dims(q.shape[-1], v.shape[-1], q.dtype),
        **meta(t),
    )  # fmt: skip


def strided_dq(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor,
    gates: torch.Tensor, dq: torch.Tensor, sequences: Sequences, places: Places, scale: float, *, branch: int, add: bool,
) -> None:  # fmt: skip
    """Write the gradient of q, or, if ``add``, add it to what ``dq`` holds. ``branch``: its gate, or `NO_GATE`."""
    G, h = k.shape[1], q.shape[1] // k.shape[1]
    t = tile(f"{places.name}_dq", q, v.shape[-1], sequences.longest)
    bm, by_tma = rows_for(t, h), can_describe(t, k, v)
    launch(
        strided_backward.strided_dq, (triton.cdiv(sequences.longest, bm // h) * sequences.count * G,), q, q, k, v,
        *descriptors(k, t.bn, by_tma), *descriptors(v, t.bn, by_tma), grad, lse, delta, gates, dq,
        *_sequence_arguments(sequences, q, k), places.window, scale * LOG2E, scale, STRIDE=places.stride, OFFSET=places.offset,
        h=h, BM=bm, BN=t.bn, LOOPS=t.loops, WINDOWED=places.is_window, BRANCH=branch, ADD=add, TMA=by_tma,
        PACKED=sequences.is_packed, **head_dims(q.shape[-1], v.shape[-1], q.dtype), **meta(t),
    )  # fmt: skip


def strided_dkv(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor,
    gates: torch.Tensor, sequences: Sequences, places: Places, scale: float, *, branch: int,
) -> Pair:  # fmt: skip
    """Gradients of k and v."""
    G, h = k.shape[1], q.shape[1] // k.shape[1]
    t = tile(f"{places.name}_dkv", q, v.shape[-1], sequences.longest)
    tiles_of_keys = triton.cdiv(places.most_keys(sequences), t.bn) * sequences.count * G
    segments = segments_of(sequences.longest, tiles_of_keys, places.window)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    segment = triton.cdiv(sequences.longest, segments)
    segments = triton.cdiv(sequences.longest, segment)
    parts = [x if segments == 1 else x.new_empty(segments, *x.shape, dtype=torch.float32) for x in (dk, dv)]
    launch(
        strided_backward.strided_dkv, (tiles_of_keys, segments), q, q, k, v, grad, lse, delta, gates, *parts,
        *_sequence_arguments(sequences, q, k), places.window, segment, len(k), scale * LOG2E, scale, STRIDE=places.stride,
        OFFSET=places.offset, h=h, BM=t.bm, BN=t.bn, LOOPS=t.loops, WINDOWED=places.is_window, BRANCH=branch,
        PACKED=sequences.is_packed, **head_dims(q.shape[-1], v.shape[-1], q.dtype), **meta(t),
    )  # fmt: skip
    if segments > 1:
        rows = len(k) * G
        launch(
            strided_backward.sum_segments, (triton.cdiv(rows, 16),), q, *parts, dk, dv, rows, segments, DK=k.shape[-1],
            PK=widths(k.shape[-1]).whole, DV=v.shape[-1], PV=widths(v.shape[-1]).whole, BR=16, num_warps=4,
        )  # fmt: skip
    return dk, dv


def segments_of(longest: int, tiles_of_keys: int, seen: int) -> int:
    """Into how many segments queries are cut, so that dk and dv have `FEW` programs; one where a key has few queries (a window)."""
    if tiles_of_keys == 0 or seen <= 2 * LEAST_SEGMENT * MOST_SEGMENTS:
        return 1
    return max(1, min(triton.cdiv(FEW, tiles_of_keys), MOST_SEGMENTS, longest // LEAST_SEGMENT))


# --- which blocks -----------------------------------------------------------------------------------------------------


class Steps(NamedTuple):
    """How importance goes over blocks: so many at once, in how many tiles of keys, and whether whole tiles need no masks."""

    blocks: int
    tiles: int
    is_clear: bool


def steps_of(bn: int, a: int, r: int) -> Steps:
    """For tiles of ``bn`` keys, compressed blocks of ``a`` strides and selection blocks of ``r``."""
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
    t = tile("importance", q, d_v, sequences.longest)
    bm, by_tma = rows_for(t, h), can_describe(t, k)
    steps = steps_of(t.bn, l // places.stride, selection.l_sel // places.stride)
    table, longest, most_keys, H, _, _ = _sequence_arguments(sequences, q, k)
    launch(
        importance.block_importance, (triton.cdiv(at.hi - at.lo, bm // h) * at.count * G,), q, q, k,
        *descriptors(k, t.bn, by_tma), lse, out, table if at.table is None else at.table, longest, most_keys, H, G,
        at.count * G, at.lo, at.hi, at.first, selection.n_blocks, scale * LOG2E, STRIDE=places.stride, OFFSET=places.offset,
        A=l // places.stride, R=selection.l_sel // places.stride, h=h, BM=bm, BN=t.bn,
        BJ=max(16, triton.next_power_of_2(steps.blocks)), STEP=steps.blocks, INNER=steps.tiles, CLEAR=steps.is_clear,
        NQ=max(16, triton.next_power_of_2(bm // h)), TMA=by_tma, PACKED=at.table is not None,
        **of_keys_alone(head_dims(q.shape[-1], d_v, q.dtype)), **meta(t),
    )  # fmt: skip


def select_blocks(
    importance: torch.Tensor, picks: torch.Tensor, sequences: Sequences, at: Range, selection: Selection
) -> None:
    """Write the picks int32 [T, G, n_sel] of the queries of ``at``, whose importance is [queries, G, blocks]."""
    pad = max(16, triton.next_power_of_2(max(selection.n_blocks, selection.n_sel)))
    launch(
        select.select_blocks, (at.tokens * picks.shape[1],), picks, importance, picks,
        picks if sequences.positions is None else sequences.positions, sequences.longest, picks.shape[1], at.first,
        selection.n_blocks, n_sel=selection.n_sel, L_SEL=selection.l_sel, LOCAL=blocks.NUM_LOCAL, PAD=pad,
        PACKED=sequences.is_packed, num_warps=1 if pad <= 512 else 2,
    )  # fmt: skip


def _pads(selection: Selection, sequences: Sequences) -> dict[str, int]:
    slots = triton.next_power_of_2(selection.n_sel)
    return {"CH": sequences.chunk, "NS": slots, "NB": triton.next_power_of_2(selection.n_blocks + 1)}


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
        at.first, at.chunks, n_blocks, piece, n_sel=selection.n_sel, **pads, BIG=1 << 30, PACKED=packed, num_warps=4,
    )  # fmt: skip
    return found


def cut_lists(
    picks: torch.Tensor, totals: torch.Tensor, sequences: Sequences, at: Range, selection: Selection, piece: int
) -> Items:
    """Items of another size from the ``totals`` that `make_lists` wrote."""
    G, found = picks.shape[1], _room(picks, at, selection, piece)
    table = picks if at.table is None else at.table
    launch(
        lists.cut_lists, (at.count * G, min(32, at.chunks)), picks, totals, *found, table, sequences.longest, G, at.lo, at.hi,
        at.first, selection.n_blocks, piece, n_sel=selection.n_sel, NB=_pads(selection, sequences)["NB"],
        PACKED=at.table is not None, num_warps=4,
    )  # fmt: skip
    return found


def _room(picks: torch.Tensor, at: Range, selection: Selection, piece: int) -> Items:
    groups = at.count * picks.shape[1]
    most = at.tokens * picks.shape[1] * selection.n_sel // piece + groups * (selection.n_blocks + 1)
    return Items(picks.new_empty(most, 4), picks.new_empty(groups, selection.n_blocks + 1))


def piece_of(h: int) -> int:
    """Queries of an item in the forward: about a thousand rows."""
    return max(16, triton.next_power_of_2(1024 // h // 2 + 1))


BACKWARD_PIECE = 256  # queries of an item there, whose dk and dv are parts in memory


# --- the selected branch ----------------------------------------------------------------------------------------------


def parts_bytes(q: torch.Tensor, d_v: int, selection: Selection) -> int:
    """Of a token's parts, in the forward or the backward, whichever has more."""
    return q.shape[1] * selection.parts * (max(q.shape[-1], d_v) * q.element_size() + 4)


def _is_wide(q: torch.Tensor, v: torch.Tensor, sequences: Sequences) -> bool:
    """Whether places inside a sequence need 64 bits."""
    return sequences.longest * q.shape[1] * max(q.shape[-1], v.shape[-1]) >= 1 << 31


def selected_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, entries: torch.Tensor, items: Items, sequences: Sequences, at: Range,
    selection: Selection, scale: float,
) -> Pair:  # fmt: skip
    """Parts of the queries of ``at`` and their log-sum-exps."""
    H, G = q.shape[1], k.shape[1]
    t = tile("selected", q, v.shape[-1], sequences.longest)
    parts = q.new_empty(at.tokens * H * selection.parts, v.shape[-1])
    lse = q.new_empty(at.tokens * H * selection.parts, dtype=torch.float32)
    launch(
        selected.selected_forward, (len(items.items), selection.sub_blocks), q, q, k, v, entries, items.items, parts, lse,
        q if at.table is None else at.table, sequences.longest, H, G, at.first, scale * LOG2E, **selection.settings(), h=H // G,
        BM=t.bm, BN=selection.sub_block, STAGES=t.stages, WIDE=_is_wide(q, v, sequences), PACKED=at.table is not None,
        **head_dims(q.shape[-1], v.shape[-1], q.dtype), num_warps=t.warps,
    )  # fmt: skip
    return parts, lse


def merge_parts(
    parts: Pair, out: torch.Tensor, lse: torch.Tensor, groups: int, sequences: Sequences, at: Range, selection: Selection,
    gated: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> None:  # fmt: skip
    """Write output and log-sum-exp of the selected branch; given (o_cmp, o_win, gates, total), the gated sum to the last (Eq.
    5).
    """
    H, d_v = out.shape[1:]
    h, part = H // groups, widths(d_v)
    heads = triton.next_power_of_2(h)
    o_cmp, o_win, gates, total = (out, out, out, out) if gated is None else gated
    launch(
        selected.merge_parts, (at.tokens * groups,), out, *parts, out, lse, o_cmp, o_win, gates, total,
        out if sequences.positions is None else sequences.positions, sequences.longest, H, groups, at.first,
        **selection.settings(), h=h, DV=d_v, E0=part.d0, E1=part.d1, HP=heads, NP=triton.next_power_of_2(selection.parts),
        GATED=gated is not None, PACKED=sequences.is_packed, num_warps=max(2, min(8, heads * part.whole // 512)),
    )  # fmt: skip


def selected_gradients(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor,
    gates: torch.Tensor, entries: torch.Tensor, items: Items, dq: torch.Tensor, d_keys: Pair, sequences: Sequences, at: Range,
    selection: Selection, scale: float, *, branch: int, add_dq: bool, add_keys: bool,
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
        selected_backward.selected_backward, (len(items.items), selection.sub_blocks), q, q, k, v, grad, lse, delta, gates,
        entries, items.items, part_dq, part_k, part_v, table, sequences.longest, H, G, at.first, scale * LOG2E, scale,
        **selection.settings(), h=h, BM=t.bm, BN=selection.sub_block, STAGES=t.stages, BRANCH=branch, DQ=True,
        TRANSPOSED=capability(q.device).startswith("sm_9"), WIDE=_is_wide(q, v, sequences), PACKED=at.table is not None,
        **head_dims(d_k, d_v, q.dtype), num_warps=t.warps,
    )  # fmt: skip
    rows = min(16, selection.sub_block)
    launch(
        selected_backward.sum_items, (at.count * G * selection.n_blocks, triton.cdiv(selection.l_sel, rows)), q, part_k, part_v,
        items.starts, *d_keys, table, sequences.longest, G, selection.n_blocks, L_SEL=selection.l_sel, SUB=selection.sub_blocks,
        BN=selection.sub_block, DK=d_k, PK=widths(d_k).whole, DV=d_v, PV=widths(d_v).whole, BR=rows, ADD=add_keys,
        PACKED=at.table is not None, num_warps=4,
    )  # fmt: skip
    width = h * d_k
    block = min(1024, triton.next_power_of_2(width))
    launch(
        selected_backward.merge_dq, (at.tokens * G, triton.cdiv(width, block)), q, part_dq, dq,
        q if sequences.positions is None else sequences.positions, sequences.longest, G, at.first, **selection.settings(),
        WIDTH=width, BLOCK=block, ADD=add_dq, PACKED=sequences.is_packed, num_warps=4,
    )  # fmt: skip


# --- the gates --------------------------------------------------------------------------------------------------------


def gates_backward(
    grad: torch.Tensor, outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], gates: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient of the gates [T, H, 3], and delta of each branch [3, T, H]."""
    d_gates, delta = torch.empty_like(gates), grad.new_empty(3, *grad.shape[:2], dtype=torch.float32)
    rows, part = delta[0].numel(), widths(grad.shape[-1])
    launch(
        gate_kernels.gates_backward, (triton.cdiv(rows, 32),), grad, grad, *outputs, d_gates, delta, rows,
        D=part.d, D0=part.d0, D1=part.d1, BLOCK=32, num_warps=4,
    )  # fmt: skip
    return d_gates, delta


def row_sums(grad: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Delta [T, H] of a branch without gates."""
    delta, part = grad.new_empty(grad.shape[:2], dtype=torch.float32), widths(grad.shape[-1])
    launch(
        gate_kernels.row_sums, (triton.cdiv(delta.numel(), 32),), grad, grad, out, delta, delta.numel(),
        D=part.d, D0=part.d0, D1=part.d1, BLOCK=32, num_warps=4,
    )  # fmt: skip
    return delta
