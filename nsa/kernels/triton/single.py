"""One branch alone on a GPU, with the interface of `nsa.kernels.cpu.strided`: for a forced branch, for benchmarks and for tests."""

import torch
import triton

from nsa.kernels import blocks
from nsa.kernels.triton import block_schedule, branches, pick_blocks, selection_schedule, sequences
from nsa.kernels.triton.branches import Pair, Places, flat
from nsa.kernels.triton.launch import launch
from nsa.kernels.triton.selection_schedule import BACKWARD_PIECE, Selection
from nsa.kernels.triton.sequences import Sequences

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _batch(q: torch.Tensor, l: int = 1, d: int = 1, l_sel: int = 1, bytes_of_parts: int = 0) -> Sequences:
    return sequences.batch(q.shape[0], q.shape[1], l, d, l_sel, bytes_of_parts, q.device)


def _strided_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seqs: Sequences, places: Places, scale: float
) -> Pair:
    out, lse = q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3], dtype=torch.float32)
    flat_q, flat_k, flat_v = flat(q, k, v)
    branches.strided_forward(flat_q, flat_k, flat_v, seqs, places, scale, out.flatten(0, 1), lse.flatten(0, 1))
    return out, lse


def _strided_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    seqs: Sequences, places: Places, scale: float,
) -> Triple:  # fmt: skip
    grad, flat_q, flat_k, flat_v, out, lse = flat(grad, q, k, v, out, lse)
    dq = torch.empty_like(flat_q)
    given = grad, flat_q, flat_k, flat_v, branches.row_sums(grad, out, lse)
    branches.strided_dq(*given, dq, seqs, places, scale, add=False)
    dk, dv = branches.strided_dkv(*given, seqs, places, scale)
    return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)


def sliding_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, w: int, scale: float) -> Pair:
    """As `cpu.sliding_forward`."""
    return _strided_forward(q, k, v, _batch(q), branches.window(w), scale)


def sliding_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    w: int, scale: float,
) -> Triple:  # fmt: skip
    """As `cpu.sliding_backward`."""
    return _strided_backward(grad, q, k, v, out, lse, _batch(q), branches.window(w), scale)


def compressed_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, l: int, d: int, l_sel: int, scale: float
) -> Triple:
    """As `cpu.compressed_forward`, with the log-sum-exp [B, S, H] too, -inf where a query sees no block."""
    seqs, places = _batch(q, l, d), branches.compression(l, d)
    out, lse = _strided_forward(q, k, v, seqs, places, scale)
    selection = Selection(l_sel, 1, blocks.num_selection(q.shape[1], l_sel))
    # Zero where the kernel writes nothing: behind a query's own block.
    importance = q.new_zeros(*q.shape[:2], k.shape[2], selection.n_blocks, dtype=torch.float32)
    flat_q, flat_k, flat_lse, flat_importance = flat(q, k, lse, importance)
    block_schedule.block_importance(
        flat_q, flat_k, v.shape[-1], flat_lse, seqs, seqs.ranges[0], places, selection, l, scale, flat_importance
    )
    return out, lse, importance


def compressed_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    l: int, d: int, _: int, scale: float,
) -> Triple:  # fmt: skip
    """As `cpu.compressed_backward`."""
    return _strided_backward(grad, q, k, v, out, lse, _batch(q, l, d), branches.compression(l, d), scale)


def select_blocks(importance: torch.Tensor, l_sel: int, n_sel: int) -> torch.Tensor:
    """As `blocks.select`."""
    B, S, G, n_blocks = importance.shape
    seqs, selection = _batch(importance), Selection(l_sel, n_sel, n_blocks)
    picks = torch.empty(B * S, G, n_sel, dtype=torch.int32, device=importance.device)
    block_schedule.select_blocks(importance.contiguous(), picks, seqs, seqs.ranges[0], selection)
    return mask_of(picks, n_blocks).view(importance.shape)


def mask_of(picks: torch.Tensor, n_blocks: int) -> torch.Tensor:
    """Return bool [T, G, blocks] of picks int32 [T, G, n]."""
    chosen = torch.empty(*picks.shape[:2], n_blocks, dtype=torch.int8, device=picks.device)
    launch(
        pick_blocks.mask_of_picks, (picks.shape[0] * picks.shape[1],), picks, picks, chosen, n_blocks, n_sel=picks.shape[2],
        PAD=max(16, triton.next_power_of_2(n_blocks)), num_warps=1,
    )  # fmt: skip
    return chosen.view(torch.bool)


def picks_of(chosen: torch.Tensor, n_sel: int) -> torch.Tensor:
    """Return picks int32 [T, G, n_sel] of a selection bool [B, S, G, Ns]."""
    B, S, G, n_blocks = chosen.shape
    picks = torch.empty(B * S, G, n_sel, dtype=torch.int32, device=chosen.device)
    launch(
        pick_blocks.picks_of_mask, (B * S * G,), picks, chosen.contiguous().view(torch.int8), picks, n_blocks, n_sel=n_sel,
        PAD=max(16, triton.next_power_of_2(max(n_blocks, n_sel))), num_warps=1,
    )  # fmt: skip
    return picks


def _room_for_lists(picks: torch.Tensor, at: sequences.Range, selection: Selection) -> Pair:
    G = picks.shape[1]
    return picks.new_empty(at.tokens * G * selection.n_sel), picks.new_empty(at.count * G * selection.n_blocks)


def selected_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chosen: torch.Tensor, l_sel: int, n_sel: int, scale: float
) -> Pair:
    """As `nsa.kernels.cpu.selected.selected_forward`."""
    flat_q, flat_k, flat_v = flat(q, k, v)
    selection = Selection.of(q.shape[1], l_sel, n_sel, q, v.shape[-1])
    seqs = _batch(q, l_sel=l_sel, bytes_of_parts=selection_schedule.parts_bytes(flat_q, v.shape[-1], selection))
    out, lse = q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3], dtype=torch.float32)
    picks = picks_of(chosen, selection.n_sel)
    for at in seqs.ranges:
        selection_schedule.attend(
            flat_q, flat_k, flat_v, picks, *_room_for_lists(picks, at, selection), seqs, at, selection, scale, out.flatten(0, 1),
            lse.flatten(0, 1),
        )  # fmt: skip
    return out, lse


def selected_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    chosen: torch.Tensor, l_sel: int, n_sel: int, scale: float,
) -> Triple:  # fmt: skip
    """As `cpu_selected.selected_backward`."""
    grad, flat_q, flat_k, flat_v, out, lse = flat(grad, q, k, v, out, lse)
    selection = Selection.of(q.shape[1], l_sel, n_sel, q, v.shape[-1])
    seqs = _batch(q, l_sel=l_sel, bytes_of_parts=selection_schedule.parts_bytes(flat_q, v.shape[-1], selection))
    picks, rows, dq = picks_of(chosen, selection.n_sel), branches.row_sums(grad, out, lse), torch.empty_like(flat_q)
    several = len(seqs.ranges) > 1
    d_keys = tuple(x.new_zeros(x.shape, dtype=torch.float32 if several else x.dtype) for x in (flat_k, flat_v))
    for at in seqs.ranges:
        entries, totals = _room_for_lists(picks, at, selection)
        items = selection_schedule.make_lists(picks, entries, totals, seqs, at, selection, BACKWARD_PIECE)
        selection_schedule.selected_gradients(
            grad, flat_q, flat_k, flat_v, rows, picks, entries, items, dq, (d_keys[0], d_keys[1]), seqs, at, selection,
            scale, add_dq=False, add_keys=several,
        )  # fmt: skip
    return dq.view(q.shape), d_keys[0].to(k.dtype).view(k.shape), d_keys[1].to(v.dtype).view(v.shape)
