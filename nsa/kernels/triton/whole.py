"""The whole of NSA on a GPU, forward and backward: the kernels in sequence (Eq. 5 of arXiv 2502.11089).

Forward: compression, window; then, for each range of queries, importance, picks, lists (three kernels), the selected branch
by block, and its parts merged with the gated sum: 9 launches where one range suffices. Backward: gates and delta; dq and dk,
dv of compression and window; then, a range at a time, the selected branch: 10 launches. Nothing waits for the device and no
size depends on what is in it, so that a step can be captured in a CUDA graph; no kernel uses atomics, so that each run gives
the same bits.

Shapes as in `nsa_attention`: q [B, S, H, Dk], keys [B, N, G, Dk], values [B, N, G, Dv], gates [B, S, H, 3].
"""

from typing import NamedTuple

import torch
import triton

from nsa.kernels import blocks
from nsa.kernels.triton import block_schedule, branches, selection_schedule, sequences
from nsa.kernels.triton.branches import Pair, flat
from nsa.kernels.triton.selection_schedule import BACKWARD_PIECE, Selection
from nsa.kernels.triton.sequences import Sequences
from nsa.sizes import Sizes

MOST_BLOCKS = 1 << 15  # of a sequence
SORTED_BITS = 30  # of a number that names a pick, its query and its slot
MOST_HEADS = 128  # of a group: sums of their probabilities are float16's


class Kept(NamedTuple):
    """What the forward leaves for the backward: the branches' outputs [T, H, Dv], their log-sum-exps [3, T, H] float32, and the
    selection.

    ``picks`` int32 [T, G, n]; ``entries`` int32 [T * G * n] are the lists, range by range; ``totals`` int32, a range and
    sequence and group after another, how many queries picked each block.
    """

    o_cmp: torch.Tensor
    o_sel: torch.Tensor
    o_win: torch.Tensor
    lse: torch.Tensor
    picks: torch.Tensor
    entries: torch.Tensor
    totals: torch.Tensor


def check_limits(S: int, H: int, G: int, d_k: int, d_v: int, sizes: Sizes) -> None:
    """Refuse what would not fit the kernels' numbers. ValueError."""
    n_blocks = blocks.num_selection(S, sizes.select_block)
    if n_blocks >= MOST_BLOCKS:
        raise ValueError(
            f"{S} tokens are {n_blocks} blocks of select_block={sizes.select_block}: the kernels sort fewer than {MOST_BLOCKS}"
        )
    slots = triton.next_power_of_2(min(sizes.n_select, n_blocks))
    if n_blocks * sequences.CHUNK * slots >= 1 << SORTED_BITS:
        raise ValueError(
            f"n_select={sizes.n_select} of {n_blocks} blocks: the Triton kernels sort a pick with its query in {SORTED_BITS} bits"
        )
    if S * G * max(d_k, d_v) >= 1 << 31:
        raise ValueError(
            f"{S} tokens of {G} groups and head dim {max(d_k, d_v)}: the Triton kernels count keys' elements in 31 bits"
        )
    if H // G > MOST_HEADS:
        raise ValueError(f"{H // G} heads per group: the Triton kernels take {MOST_HEADS} at most")


def sequences_of(q: torch.Tensor, G: int, d_v: int, cu_seqlens: torch.Tensor | None, sizes: Sizes) -> Sequences:
    """Return the sequences of a batch, or of a pack: then ``cu_seqlens`` is read on the host."""
    B, S = q.shape[:2]
    check_limits(S, q.shape[2], G, q.shape[3], d_v, sizes)
    each = selection_schedule.parts_bytes(
        q.flatten(0, 1), d_v, Selection.of(S, sizes.select_block, sizes.n_select, q, d_v)
    )
    if cu_seqlens is None:
        return sequences.batch(B, S, sizes.compress_block, sizes.compress_stride, sizes.select_block, each, q.device)
    return sequences.pack(
        cu_seqlens.tolist(), sizes.compress_block, sizes.compress_stride, sizes.select_block, each, q.device
    )


def empty_kept(q: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None, sizes: Sizes) -> Kept:
    """Return room for what is kept; its shapes follow from those of the arguments alone, as a traced graph requires."""
    B, S, H, _ = q.shape
    tokens, G, d_v = B * S, v.shape[2], v.shape[3]
    selection = Selection.of(S, sizes.select_block, sizes.n_select, q, d_v)
    each = selection_schedule.parts_bytes(q.flatten(0, 1), d_v, selection)
    groups = G * sequences.most_groups(tokens, B if cu_seqlens is None else max(1, cu_seqlens.shape[0] - 1), each)
    o_cmp, o_sel, o_win = (q.new_empty(tokens, H, d_v) for _ in range(3))
    return Kept(
        o_cmp, o_sel, o_win, q.new_empty(3, tokens, H, dtype=torch.float32),
        q.new_empty(tokens, G, selection.n_sel, dtype=torch.int32),
        q.new_empty(tokens * G * selection.n_sel, dtype=torch.int32),
        q.new_empty(groups * selection.n_blocks, dtype=torch.int32),
    )  # fmt: skip


def forward(
    q: torch.Tensor, cmp: Pair, sel: Pair, win: Pair, gates: torch.Tensor, cu_seqlens: torch.Tensor | None, sizes: Sizes,
    scale: float,
) -> tuple[torch.Tensor, Kept]:  # fmt: skip
    """Return Eq. 5, [B, S, H, Dv], and what the backward needs. ``scale`` is positive."""
    kept = empty_kept(q, sel[1], cu_seqlens, sizes)
    seqs = sequences_of(q, sel[0].shape[2], sel[1].shape[-1], cu_seqlens, sizes)
    out = q.new_empty(*q.shape[:3], sel[1].shape[-1])
    flat_q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, flat_gates = flat(q, *cmp, *sel, *win, gates)
    places = branches.compression(sizes.compress_block, sizes.compress_stride)
    branches.strided_forward(flat_q, k_cmp, v_cmp, seqs, places, scale, kept.o_cmp, kept.lse[0])
    branches.strided_forward(flat_q, k_win, v_win, seqs, branches.window(sizes.window), scale, kept.o_win, kept.lse[2])
    G = sel[0].shape[2]
    selection = _selection(seqs, q, sel[1], kept, sizes)
    groups = 0
    for at in seqs.ranges:
        importance = q.new_empty(at.tokens, G, selection.n_blocks, dtype=torch.float32)
        block_schedule.block_importance(
            flat_q,
            k_cmp,
            v_cmp.shape[-1],
            kept.lse[0],
            seqs,
            at,
            places,
            selection,
            sizes.compress_block,
            scale,
            importance,
        )
        block_schedule.select_blocks(importance, kept.picks, seqs, at, selection)
        del importance
        entries, totals, groups = _of_range(kept, at, selection, G, groups)
        selection_schedule.attend(
            flat_q, k_sel, v_sel, kept.picks, entries, totals, seqs, at, selection, scale, kept.o_sel, kept.lse[1],
            (kept.o_cmp, kept.o_win, flat_gates, out.flatten(0, 1)),
        )  # fmt: skip
    return out, kept


def _selection(seqs: Sequences, q: torch.Tensor, v: torch.Tensor, kept: Kept, sizes: Sizes) -> Selection:
    # As many picks as ``kept`` has room for: in a pack of short sequences, -1 behind the last.
    return Selection.of(seqs.longest, sizes.select_block, sizes.n_select, q, v.shape[-1])._replace(
        n_sel=kept.picks.shape[-1]
    )


def _of_range(
    kept: Kept, at: sequences.Range, selection: Selection, G: int, groups: int
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return a range's lists and totals, and how many (sequence, group) pairs came before the next range's."""
    each = G * selection.n_sel
    end = groups + at.count * G
    totals = kept.totals[groups * selection.n_blocks : end * selection.n_blocks]
    return kept.entries[at.first * each : at.end * each], totals, end


def backward(
    grad: torch.Tensor, q: torch.Tensor, cmp: Pair, sel: Pair, win: Pair, gates: torch.Tensor, kept: Kept,
    cu_seqlens: torch.Tensor | None, sizes: Sizes, scale: float,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Return gradients of q, keys and values in the order of the arguments, and gates."""
    seqs = sequences_of(q, sel[0].shape[2], sel[1].shape[-1], cu_seqlens, sizes)
    flat_grad, flat_q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, flat_gates = flat(grad, q, *cmp, *sel, *win, gates)
    d_gates, rows = branches.gates_backward(flat_grad, (kept.o_cmp, kept.o_sel, kept.o_win), flat_gates, kept.lse)
    dq, G = torch.empty_like(flat_q), k_sel.shape[1]
    strided = (
        (0, k_cmp, v_cmp, branches.compression(sizes.compress_block, sizes.compress_stride)),
        (2, k_win, v_win, branches.window(sizes.window)),
    )
    found = []
    for branch, k, v, places in strided:
        given = flat_grad, flat_q, k, v, rows.of(branch)
        branches.strided_dq(*given, dq, seqs, places, scale, add=branch > 0)
        found.append(branches.strided_dkv(*given, seqs, places, scale))
    selection = _selection(seqs, q, sel[1], kept, sizes)
    several = len(seqs.ranges) > 1
    make = torch.zeros_like if several else torch.empty_like
    d_sel = make(k_sel, dtype=torch.float32 if several else None), make(v_sel, dtype=torch.float32 if several else None)
    groups = 0
    for at in seqs.ranges:
        entries, totals, groups = _of_range(kept, at, selection, G, groups)
        items = selection_schedule.cut_lists(kept.picks, totals, seqs, at, selection, BACKWARD_PIECE)
        selection_schedule.selected_gradients(
            flat_grad, flat_q, k_sel, v_sel, rows.of(1), kept.picks, entries, items, dq, d_sel, seqs, at, selection, scale,
            add_dq=True, add_keys=several,
        )  # fmt: skip
    found.insert(1, (d_sel[0].to(k_sel.dtype), d_sel[1].to(v_sel.dtype)))
    keys = [
        x.view(like.shape)
        for pair, likes in zip(found, (cmp, sel, win), strict=True)
        for x, like in zip(pair, likes, strict=True)
    ]
    return dq.view(q.shape), *keys, d_gates.view(gates.shape)
