"""Backward of the window and the compressed branch: one kernel for dq, over keys, one for dk and dv, over queries.

As in FlashAttention-2, probabilities are made again from the log-sum-exp. The gradient of the gated sum is read as it is: a
row's gate is in its log-sum-exp (`gates`), so that probabilities come out times their gate, and no branch's gradient is ever
written. dk and dv of a tile of keys come from all heads of its group; where tiles are few, queries are cut into segments
whose sums are written separately and added in order by `sum_segments`. Nothing is added to what another program adds to, so each
run gives the same bits.

Flat layouts (`rows`); grad [T, H, Dv]; delta and gated lse [T, H] float32, as `gates` makes them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa.kernels.triton.rows import (
    LENGTHS,
    add_product,
    keys_of,
    load_two,
    product,
    store_two,
    tokens_of,
    visible_keys,
    zeros_two,
)
from nsa.kernels.triton.strided import hide, load_keys


@triton.jit
def _dq_tile(
    q0, q1, do0, do1, lse, delta, dq0, dq1, n0, at_k, at_v, KD0, KD1, VD0, VD1, row, k_column, v_column, t, N, WINDOW,
    k_stride, v_stride, qk,
    STRIDE: tl.constexpr, OFFSET: tl.constexpr, DK: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr,
    E0: tl.constexpr, E1: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    k0, k1, v0, v1 = load_keys(
        at_k, at_v, KD0, KD1, VD0, VD1, n0, row, k_column, v_column, N, k_stride, v_stride, DK, D0, D1, DV, E0, E1, BN, MASKED, TMA,
    )  # fmt: skip
    p = tl.exp2(product(q0, q1, k0, k1, D1, PRECISION) * qk - lse[:, None])
    if MASKED:
        n = n0 + tl.arange(0, BN)
        p = tl.where(hide(n[None, :], t[:, None], N, WINDOW, STRIDE, OFFSET, WINDOWED), p, 0.0)
    ds = p * (product(do0, do1, v0, v1, E1, PRECISION) - delta[:, None])
    return add_product(ds.to(k0.dtype), k0, k1, dq0, dq1, D1, PRECISION)


@triton.jit(do_not_specialize=LENGTHS)
def strided_dq(
    Q, K, V, KD0, KD1, VD0, VD1, GRAD, LSE, DELTA, DQ, SEQUENCES, S, N, H, G, BG, WINDOW, qk, scale,
    STRIDE: tl.constexpr, OFFSET: tl.constexpr, h: tl.constexpr, DK: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    DV: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, LOOPS: tl.constexpr,
    WINDOWED: tl.constexpr, ADD: tl.constexpr, TMA: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write dq of BM // h queries of a group, as `strided_forward`; if ADD, add it to what DQ holds. Grid (tiles * BG,)."""
    BQ: tl.constexpr = BM // h
    bg = tl.program_id(0) % BG
    b, g = bg // G, bg % G
    first = (tl.cdiv(S, BQ) - 1 - tl.program_id(0) // BG) * BQ
    s0, S = tokens_of(SEQUENCES, b, S, PACKED)
    if PACKED and first >= S:
        return
    key0, N = keys_of(SEQUENCES, b, s0, S, N, WINDOWED, PACKED)
    r = tl.arange(0, BM)
    t = first + r // h
    there = (r < BQ * h) & (t < S)
    rows = (s0 + t).to(tl.int64) * H + g * h + r % h
    q0, q1 = load_two(Q, rows * DK, there, DK, D0, D1, True)
    do0, do1 = load_two(GRAD, rows * DV, there, DV, E0, E1, True)
    lse = tl.load(LSE + rows, mask=there, other=float("inf"))
    delta = tl.load(DELTA + rows, mask=there, other=0.0)
    at_k, at_v = K + (key0.to(tl.int64) * G + g) * DK, V + (key0.to(tl.int64) * G + g) * DV
    dq0, dq1 = zeros_two(BM, D0, D1)
    last = tl.minimum(first + BQ, S) - 1
    end = visible_keys(last, N, STRIDE, OFFSET)
    start = tl.maximum(0, first - WINDOW + 1)
    if LOOPS > 1:
        whole = visible_keys(first, N, STRIDE, OFFSET)
        if WINDOWED:
            inside = start + tl.cdiv(tl.maximum(0, last - WINDOW + 1) - start, BN) * BN
            for n0 in tl.range(start, tl.minimum(inside, end), BN):
                dq0, dq1 = _dq_tile(
                    q0, q1, do0, do1, lse, delta, dq0, dq1, n0, at_k, at_v, KD0, KD1, VD0, VD1, key0, g * DK, g * DV, t,
                    N, WINDOW, G * DK, G * DV, qk, STRIDE, OFFSET, DK, D0, D1, DV, E0, E1, BN, True, WINDOWED, TMA, PRECISION,
                )  # fmt: skip
            start = inside
        stop = start + tl.maximum(0, whole - start) // BN * BN
        for n0 in tl.range(start, stop, BN):
            dq0, dq1 = _dq_tile(
                q0, q1, do0, do1, lse, delta, dq0, dq1, n0, at_k, at_v, KD0, KD1, VD0, VD1, key0, g * DK, g * DV, t,
                N, WINDOW, G * DK, G * DV, qk, STRIDE, OFFSET, DK, D0, D1, DV, E0, E1, BN, False, WINDOWED, TMA, PRECISION,
            )  # fmt: skip
        start = stop
    for n0 in tl.range(start, end, BN):
        dq0, dq1 = _dq_tile(
            q0, q1, do0, do1, lse, delta, dq0, dq1, n0, at_k, at_v, KD0, KD1, VD0, VD1, key0, g * DK, g * DV, t,
            N, WINDOW, G * DK, G * DV, qk, STRIDE, OFFSET, DK, D0, D1, DV, E0, E1, BN, True, WINDOWED, TMA, PRECISION,
        )  # fmt: skip
    dq0 = dq0 * scale
    if D1 > 0:
        dq1 = dq1 * scale
    if ADD:
        x0, x1 = load_two(DQ, rows * DK, there, DK, D0, D1, True)
        dq0 += x0.to(tl.float32)
        if D1 > 0:
            dq1 += x1.to(tl.float32)
    store_two(DQ, rows * DK, there, dq0, dq1, DK, D0, D1)


@triton.jit
def rows_give(
    p, v0, v1, dk0, dk1, dv0, dv1, q0, q1, do0, do1, delta, D1: tl.constexpr, E1: tl.constexpr, PRECISION: tl.constexpr
):
    """Add to dk and dv what rows of gated probabilities p^T [keys, rows] give; return ds^T, too. All stays in registers, nothing
    is transposed.
    """
    dv0, dv1 = add_product(p.to(do0.dtype), do0, do1, dv0, dv1, E1, PRECISION)
    ds = (p * (product(v0, v1, do0, do1, E1, PRECISION) - delta[None, :])).to(q0.dtype)
    dk0, dk1 = add_product(ds, q0, q1, dk0, dk1, D1, PRECISION)
    return dk0, dk1, dv0, dv1, ds


@triton.jit
def _segment_tile(
    k0, k1, v0, v1, dk0, dk1, dv0, dv1, r0, end, Q, GRAD, LSE, DELTA, token0, n, N, H, WINDOW, qk,
    STRIDE: tl.constexpr, OFFSET: tl.constexpr, h: tl.constexpr, DK: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    DV: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr, BM: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add rows r0 ... r0 + BM - 1 of a sequence and group, counted over queries and heads, to the dk and dv of keys n."""
    r = r0 + tl.arange(0, BM)
    t = r // h
    there = r < end
    # 64 bits for the tile's first query, 32 from there.
    t0 = r0 // h
    base = (token0 + t0).to(tl.int64) * H
    row = (t - t0) * H + r % h
    q0, q1 = load_two(Q + base * DK, row * DK, there, DK, D0, D1, MASKED)
    do0, do1 = load_two(GRAD + base * DV, row * DV, there, DV, E0, E1, MASKED)
    if MASKED:
        lse = tl.load(LSE + base + row, mask=there, other=float("inf"))
        delta = tl.load(DELTA + base + row, mask=there, other=0.0)
    else:
        lse = tl.load(LSE + base + row)
        delta = tl.load(DELTA + base + row)
    p = tl.exp2(product(k0, k1, q0, q1, D1, PRECISION) * qk - lse[None, :])
    if MASKED:
        p = tl.where(hide(n[:, None], t[None, :], N, WINDOW, STRIDE, OFFSET, WINDOWED), p, 0.0)
    dk0, dk1, dv0, dv1, _ = rows_give(p, v0, v1, dk0, dk1, dv0, dv1, q0, q1, do0, do1, delta, D1, E1, PRECISION)
    return dk0, dk1, dv0, dv1


# Where S is a multiple of 16, registers of an H100 hold more of its loops (kernels_compiled.json): another variant for that.
@triton.jit(do_not_specialize=[name for name in LENGTHS if name != "S"])
def strided_dkv(
    Q, K, V, GRAD, LSE, DELTA, OUT_K, OUT_V, SEQUENCES, S, N, H, G, BG, WINDOW, SEGMENT, keys, qk, scale,
    STRIDE: tl.constexpr, OFFSET: tl.constexpr, h: tl.constexpr, DK: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    DV: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, LOOPS: tl.constexpr,
    WINDOWED: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write what the queries of a segment give to BN keys of a group. Grid (tiles of keys * BG, segments).

    OUT [segments, keys, G, D], where the tensors have ``keys`` keys in all; segments are of SEGMENT queries, counted in a sequence.
    """
    bg = tl.program_id(0) % BG
    b, g = bg // G, bg % G
    n_lo = tl.program_id(0) // BG * BN
    segment = tl.program_id(1)
    s0, S = tokens_of(SEQUENCES, b, S, PACKED)
    key0, N = keys_of(SEQUENCES, b, s0, S, N, WINDOWED, PACKED)
    if PACKED and n_lo >= N:
        return
    n_hi = tl.minimum(n_lo + BN, N) - 1
    t_lo = tl.maximum(n_lo * STRIDE + OFFSET, segment * SEGMENT)
    t_end = tl.minimum(S, (segment + 1) * SEGMENT)
    if WINDOWED:
        t_end = tl.minimum(t_end, n_hi + WINDOW)
    n = n_lo + tl.arange(0, BN)
    inside = n < N
    at = (key0 + n).to(tl.int64) * G + g
    k0, k1 = load_two(K, at * DK, inside, DK, D0, D1, True)
    v0, v1 = load_two(V, at * DV, inside, DV, E0, E1, True)
    dk0, dk1 = zeros_two(BN, D0, D1)
    dv0, dv1 = zeros_two(BN, E0, E1)
    at_q, at_grad = Q + g * h * DK, GRAD + g * h * DV
    at_lse, at_delta = LSE + g * h, DELTA + g * h
    start, end = t_lo * h, tl.maximum(t_lo, t_end) * h
    if LOOPS > 1:
        # Rows that see all BN keys, in whole tiles: from ``clear`` to ``stop``.
        whole_end = end
        if WINDOWED:
            whole_end = tl.minimum(end, (n_lo + WINDOW) * h)
        whole_end = tl.where(n_lo + BN <= N, whole_end, 0)
        clear = start + tl.cdiv(tl.maximum(start, (n_hi * STRIDE + OFFSET) * h) - start, BM) * BM
        stop = clear + tl.maximum(0, whole_end - clear) // BM * BM
        for r0 in tl.range(start, tl.minimum(clear, end), BM):
            dk0, dk1, dv0, dv1 = _segment_tile(
                k0, k1, v0, v1, dk0, dk1, dv0, dv1, r0, end, at_q, at_grad, at_lse, at_delta, s0,
                n, N, H, WINDOW, qk, STRIDE, OFFSET, h, DK, D0, D1, DV, E0, E1, BM, True, WINDOWED, PRECISION,
            )  # fmt: skip
        for r0 in tl.range(clear, stop, BM):
            dk0, dk1, dv0, dv1 = _segment_tile(
                k0, k1, v0, v1, dk0, dk1, dv0, dv1, r0, end, at_q, at_grad, at_lse, at_delta, s0,
                n, N, H, WINDOW, qk, STRIDE, OFFSET, h, DK, D0, D1, DV, E0, E1, BM, False, WINDOWED, PRECISION,
            )  # fmt: skip
        start = stop
    for r0 in tl.range(start, end, BM):
        dk0, dk1, dv0, dv1 = _segment_tile(
            k0, k1, v0, v1, dk0, dk1, dv0, dv1, r0, end, at_q, at_grad, at_lse, at_delta, s0,
            n, N, H, WINDOW, qk, STRIDE, OFFSET, h, DK, D0, D1, DV, E0, E1, BM, True, WINDOWED, PRECISION,
        )  # fmt: skip
    dk0 = dk0 * scale
    if D1 > 0:
        dk1 = dk1 * scale
    at += segment.to(tl.int64) * keys * G
    store_two(OUT_K, at * DK, inside, dk0, dk1, DK, D0, D1)
    store_two(OUT_V, at * DV, inside, dv0, dv1, DV, E0, E1)


@triton.jit
def _sum(PARTS, OUT, row, rows, segments, D: tl.constexpr, PD: tl.constexpr, BR: tl.constexpr):
    column = tl.arange(0, PD)
    there = (row < rows)[:, None] & (column < D)[None, :]
    total = tl.zeros([BR, PD], tl.float32)
    at = PARTS + row[:, None] * D + column[None, :]
    for _ in range(segments):
        total += tl.load(at, mask=there, other=0.0)
        at += rows * D
    tl.store(OUT + row[:, None] * D + column[None, :], total.to(OUT.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=LENGTHS)
def sum_segments(
    PARTS_K, PARTS_V, OUT_K, OUT_V, rows, segments, DK: tl.constexpr, PK: tl.constexpr, DV: tl.constexpr, PV: tl.constexpr,
    BR: tl.constexpr,
):  # fmt: skip
    """Add the segments of dk and dv in order: parts [segments, rows, D] float32 to [rows, D]. Grid (rows / BR,)."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    _sum(PARTS_K, OUT_K, row, rows, segments, DK, PK, BR)
    _sum(PARTS_V, OUT_V, row, rows, segments, DV, PV, BR)
