"""Launches of the kernels in Gluon, with the arguments of the plain ones and a ring; README.md has what each kernel can serve."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from importance_overlapped import KEYS, importance_overlapped
from selection_forward_tma import WIDTH, selected_forward_tma
from strided_dkv_overlapped import strided_dkv_overlapped
from strided_dq_overlapped import strided_dq_overlapped
from strided_overlapped import CONSUMERS, ROWS, strided_overlapped

from nsa.kernels.triton.block_schedule import steps_of
from nsa.kernels.triton.branches import Pair, Places, Rows, segments_of, sequence_arguments
from nsa.kernels.triton.launch import LOG2E, launch
from nsa.kernels.triton.selection_schedule import Items, Selection
from nsa.kernels.triton.sequences import Range, Sequences
from nsa.kernels.triton.tiles import widths

ROWS_OF_PROGRAM = CONSUMERS.value * ROWS.value
COPIED = WIDTH.value  # columns of a copy of rows by TMA


class Ring(NamedTuple):
    """Keys of a tile, and tiles under way; for dk and dv, rows of a tile."""

    bn: int
    stages: int


def even_stages(ring: Ring) -> int:
    """Return the stages of a ring in which each of two consumers takes every second tile."""
    return max(2, ring.stages // 2 * 2)


def descriptors(x: torch.Tensor, rows: int) -> Pair:
    """Return descriptors of both parts of x [N, G, D], ``rows`` at a time."""
    part = widths(x.shape[-1])
    return descriptor(x.flatten(1), rows, part.d0), descriptor(x.flatten(1), rows, part.d1 or part.d0)


def descriptor(matrix: torch.Tensor, rows: int, columns: int) -> Any:
    """Return a descriptor of blocks [rows, columns] of a matrix, with their layout in shared memory."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    kind = gl.bfloat16 if matrix.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], kind)
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns], layout)


def strided_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences, places: Places, scale: float, out: torch.Tensor,
    lse: torch.Tensor, ring: Ring,
) -> None:  # fmt: skip
    """Write what `branches.strided_forward` writes."""
    G, h, part = k.shape[1], q.shape[1] // k.shape[1], widths(q.shape[-1])
    launch(
        strided_overlapped, (triton.cdiv(sequences.longest, ROWS_OF_PROGRAM // h) * sequences.count * G,), q,
        q, *descriptors(k, ring.bn), descriptors(v, ring.bn)[0], out, lse, *sequence_arguments(sequences, q, k), places.window,
        scale * LOG2E, STRIDE=places.stride, OFFSET=places.offset, h=h, D0=part.d0, D1=part.d1, DV=v.shape[-1], BN=ring.bn,
        STAGES=ring.stages, WINDOWED=places.is_window, PACKED=sequences.is_packed, num_warps=4,
    )  # fmt: skip


def strided_dq(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows, dq: torch.Tensor, sequences: Sequences,
    places: Places, scale: float, ring: Ring, *, add: bool,
) -> None:  # fmt: skip
    """Write what `branches.strided_dq` writes."""
    G, h, part = k.shape[1], q.shape[1] // k.shape[1], widths(q.shape[-1])
    launch(
        strided_dq_overlapped, (triton.cdiv(sequences.longest, ROWS_OF_PROGRAM // h) * sequences.count * G,), q,
        q, *descriptors(k, ring.bn), descriptors(v, ring.bn)[0], grad, *rows, dq, *sequence_arguments(sequences, q, k),
        places.window, scale * LOG2E, scale, STRIDE=places.stride, OFFSET=places.offset, h=h, D0=part.d0, D1=part.d1,
        DV=v.shape[-1], BN=ring.bn, STAGES=ring.stages, WINDOWED=places.is_window, ADD=add, PACKED=sequences.is_packed,
        num_warps=4,
    )  # fmt: skip


def strided_dkv(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows, sequences: Sequences, places: Places,
    scale: float, ring: Ring,
) -> Pair:  # fmt: skip
    """Return what `branches.strided_dkv` returns."""
    G, h = k.shape[1], q.shape[1] // k.shape[1]
    tiles_of_keys = triton.cdiv(places.most_keys(sequences), ROWS_OF_PROGRAM) * sequences.count * G
    segment = triton.cdiv(sequences.longest, segments_of(sequences.longest, tiles_of_keys, places.window))
    segments = triton.cdiv(sequences.longest, segment)
    parts = [x.new_empty(segments, *x.shape, dtype=x.dtype if segments == 1 else torch.float32) for x in (k, v)]
    launch(
        strided_dkv_overlapped, (tiles_of_keys, segments), q, descriptor(q.view(-1, q.shape[-1]), h, COPIED), k, v,
        descriptor(grad.view(-1, v.shape[-1]), h, COPIED), *rows, *parts, *sequence_arguments(sequences, q, k), places.window,
        segment, len(k), scale * LOG2E, scale, STRIDE=places.stride, OFFSET=places.offset, h=h, DK=q.shape[-1],
        DV=v.shape[-1], BM=ring.bn, STAGES=ring.stages, WINDOWED=places.is_window, PACKED=sequences.is_packed, num_warps=4,
    )  # fmt: skip
    return parts[0].sum(0).to(k.dtype), parts[1].sum(0).to(v.dtype)


def block_importance(
    q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, sequences: Sequences, at: Range, places: Places, selection: Selection,
    l: int, scale: float, out: torch.Tensor, ring: Ring,
) -> None:  # fmt: skip
    """Write what `block_schedule.block_importance` writes."""
    G, h, part = k.shape[1], q.shape[1] // k.shape[1], widths(q.shape[-1])
    table, longest, most_keys, H, _, _ = sequence_arguments(sequences, q, k)
    table, a, r = table if at.table is None else at.table, l // places.stride, selection.l_sel // places.stride
    per_program = ROWS_OF_PROGRAM // h
    launch(
        importance_overlapped, (triton.cdiv(at.hi - at.lo, per_program) * at.count * G,), q, q,
        *descriptors(k, KEYS.value), lse, out, table, longest, most_keys, H, G, at.count * G, at.lo, at.hi, at.first,
        selection.n_blocks, scale * LOG2E, STRIDE=places.stride, OFFSET=places.offset, A=a, R=r, h=h, D0=part.d0, D1=part.d1,
        STEP=steps_of(KEYS.value, a, r).blocks, STAGES=even_stages(ring), NQ=max(8, triton.next_power_of_2(per_program)),
        PACKED=at.table is not None, num_warps=4,
    )  # fmt: skip


def selected_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, entries: torch.Tensor, items: Items, sequences: Sequences, at: Range,
    selection: Selection, scale: float, ring: Ring,
) -> Pair:  # fmt: skip
    """Return what `selection_schedule.selected_forward` returns."""
    H, G = q.shape[1], k.shape[1]
    parts = q.new_empty(at.tokens * H * selection.parts, v.shape[-1])
    lse = q.new_empty(at.tokens * H * selection.parts, dtype=torch.float32)
    launch(
        selected_forward_tma, (len(items.items), selection.sub_blocks), q,
        descriptor(q.view(-1, q.shape[-1]), H // G, COPIED), k, v, entries, items.items, parts, lse,
        q if at.table is None else at.table, sequences.longest, H, G, at.first, scale * LOG2E, **selection.settings(), h=H // G,
        DK=q.shape[-1], DV=v.shape[-1], STAGES=even_stages(ring), PACKED=at.table is not None, num_warps=4,
    )  # fmt: skip
    return parts, lse
