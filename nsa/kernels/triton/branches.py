"""Calls of the kernels of the window, the compressed branch and the gates, a function per step: layouts, grids, tiles.

`block_schedule` and `selection_schedule` have those of the selected branch; `whole` puts them in sequence; `single` serves one
branch alone.

Tensors are flat over tokens, as in `rows`: q [T, H, Dk], k [., G, Dk], v [., G, Dv], outputs [T, H, Dv], log-sum-exp and
delta [T, H] float32; contiguous all.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from nsa.kernels.triton import gates as gate_kernels
from nsa.kernels.triton import strided, strided_backward
from nsa.kernels.triton.launch import LOG2E, can_describe, descriptors, head_dims, launch, meta, rows_for
from nsa.kernels.triton.sequences import Sequences
from nsa.kernels.triton.tiles import tile, widths

Pair = tuple[torch.Tensor, torch.Tensor]

NO_WINDOW = 1 << 30
FEW = 1024  # programs of dk and dv below which queries are cut into segments
MOST_SEGMENTS, LEAST_SEGMENT = 16, 128


def flat(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return tensors [B, S, ...] as [B * S, ...], contiguous."""
    return [x.contiguous().flatten(0, 1) for x in tensors]


class Rows(NamedTuple):
    """What the backward needs of each query and head (`gates`): log-sum-exp with the gate in it and delta, float32 [T, H] or, of
    all branches, [3, T, H].
    """

    lse: torch.Tensor
    delta: torch.Tensor

    def of(self, branch: int) -> Rows:
        """Return those of one branch."""
        return Rows(self.lse[branch], self.delta[branch])


class Places(NamedTuple):
    """Where the keys of a branch lie: key n ends at token n * stride + offset; and how far back a query sees."""

    name: str
    stride: int
    offset: int
    window: int = NO_WINDOW

    @property
    def is_window(self) -> bool:
        return self.window < NO_WINDOW


def window(w: int) -> Places:
    """Return the last w tokens."""
    return Places("sliding", 1, 0, min(w, NO_WINDOW - 1))


def compression(l: int, d: int) -> Places:
    """Return the places of blocks of l tokens every d."""
    return Places("compressed", d, l - 1)


def sequence_arguments(sequences: Sequences, q: torch.Tensor, k: torch.Tensor) -> tuple[Any, ...]:
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
        *descriptors(k, t.bn, by_tma), *descriptors(v, t.bn, by_tma), out, lse, *sequence_arguments(sequences, q, k), places.window,
        scale * LOG2E, STRIDE=places.stride, OFFSET=places.offset, h=H // G, BM=bm, BN=t.bn, LOOPS=t.loops,
        WINDOWED=places.is_window, TMA=by_tma, PACKED=sequences.is_packed, **head_dims(q.shape[-1], v.shape[-1]), **meta(t),
    )  # fmt: skip


def strided_dq(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows, dq: torch.Tensor, sequences: Sequences,
    places: Places, scale: float, *, add: bool,
) -> None:  # fmt: skip
    """Write the gradient of q, or, if ``add``, add it to what ``dq`` holds."""
    G, h = k.shape[1], q.shape[1] // k.shape[1]
    t = tile(f"{places.name}_dq", q, v.shape[-1], sequences.longest)
    bm, by_tma = rows_for(t, h), can_describe(t, k, v)
    launch(
        strided_backward.strided_dq, (triton.cdiv(sequences.longest, bm // h) * sequences.count * G,), q, q, k, v,
        *descriptors(k, t.bn, by_tma), *descriptors(v, t.bn, by_tma), grad, *rows, dq,
        *sequence_arguments(sequences, q, k), places.window, scale * LOG2E, scale, STRIDE=places.stride, OFFSET=places.offset,
        h=h, BM=bm, BN=t.bn, LOOPS=t.loops, WINDOWED=places.is_window, ADD=add, TMA=by_tma,
        PACKED=sequences.is_packed, **head_dims(q.shape[-1], v.shape[-1]), **meta(t),
    )  # fmt: skip


def strided_dkv(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows, sequences: Sequences, places: Places,
    scale: float,
) -> Pair:  # fmt: skip
    """Return the gradients of k and v."""
    G, h = k.shape[1], q.shape[1] // k.shape[1]
    t = tile(f"{places.name}_dkv", q, v.shape[-1], sequences.longest)
    most_keys = sequences.longest if places.is_window else sequences.most_keys
    tiles_of_keys = triton.cdiv(most_keys, t.bn) * sequences.count * G
    segments = segments_of(sequences.longest, tiles_of_keys, places.window)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    segment = triton.cdiv(sequences.longest, segments)
    segments = triton.cdiv(sequences.longest, segment)
    parts = [x if segments == 1 else x.new_empty(segments, *x.shape, dtype=torch.float32) for x in (dk, dv)]
    launch(
        strided_backward.strided_dkv, (tiles_of_keys, segments), q, q, k, v, grad, *rows, *parts,
        *sequence_arguments(sequences, q, k), places.window, segment, len(k), scale * LOG2E, scale, STRIDE=places.stride,
        OFFSET=places.offset, h=h, BM=t.bm, BN=t.bn, LOOPS=t.loops, WINDOWED=places.is_window,
        PACKED=sequences.is_packed, **head_dims(q.shape[-1], v.shape[-1]), **meta(t),
    )  # fmt: skip
    if segments > 1:
        keys = len(k) * G
        launch(
            strided_backward.sum_segments, (triton.cdiv(keys, 16),), q, *parts, dk, dv, keys, segments,
            DK=widths(k.shape[-1]), DV=widths(v.shape[-1]), BR=16, num_warps=4,
        )  # fmt: skip
    return dk, dv


def segments_of(longest: int, tiles_of_keys: int, seen: int) -> int:
    """Return into how many segments queries are cut, so that dk and dv have `FEW` programs; one
    where a key has few queries (a window).
    """
    if tiles_of_keys == 0 or seen <= 2 * LEAST_SEGMENT * MOST_SEGMENTS:
        return 1
    return max(1, min(triton.cdiv(FEW, tiles_of_keys), MOST_SEGMENTS, longest // LEAST_SEGMENT))


# --- the gates --------------------------------------------------------------------------------------------------------


def gates_backward(
    grad: torch.Tensor, outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], gates: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, Rows]:
    """Return the gradient of the gates [T, H, 3], and what the branches' backward needs of their rows, each [3, T, H]."""
    d_gates, delta, gated = torch.empty_like(gates), torch.empty_like(lse), torch.empty_like(lse)
    rows, part = delta[0].numel(), widths(grad.shape[-1])
    launch(
        gate_kernels.gates_backward, (triton.cdiv(rows, 32),), grad, grad, *outputs, gates, lse, d_gates, delta, gated, rows,
        D=part, BLOCK=32, num_warps=4,
    )  # fmt: skip
    return d_gates, Rows(gated, delta)


def row_sums(grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Rows:
    """Return the same of a branch without gates, each [T, H]."""
    delta, gated, part = torch.empty_like(lse), torch.empty_like(lse), widths(grad.shape[-1])
    launch(
        gate_kernels.row_sums, (triton.cdiv(delta.numel(), 32),), grad, grad, out, lse, delta, gated, delta.numel(),
        D=part, BLOCK=32, num_warps=4,
    )  # fmt: skip
    return Rows(gated, delta)
