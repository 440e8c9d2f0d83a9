"""Backward of the window and the compressed branch: one kernel for dq, over keys, one for dk and dv, over queries.

As in FlashAttention-2, probabilities are made again from the log-sum-exp. The gradient of the gated sum is read as it is: a
row's gate is in its log-sum-exp (`gates`), so that probabilities come out times their gate, and no branch's gradient is ever
written. dk and dv of a tile of keys come from all heads of its group; where tiles are few, queries are cut into segments
whose sums are written separately and added in order by `sum_segments`. Nothing is added to what another program adds to, so each
run gives the same bits.

Flat layouts (`rows`); grad [T, H, Dv]; delta and gated lse [T, H] float32, as `gates` makes them.
"""

import triton
import triton.language as tl

from nsa.kernels.triton.rows import (
    LENGTHS,
    add_product,
    add_two,
    bounds_of,
    keys_of,
    load_two,
    product,
    rows_of_tile,
    scale_two,
    store_two,
    tokens_of,
    zeros_two,
)
from nsa.kernels.triton.strided import hide, keys_at, load_keys, parts_of_keys


@triton.jit
def _dq_tile(
    q, do, lse, delta, dq, n0, keys, t, N, WINDOW, qk,
    STRIDE: tl.constexpr, OFFSET: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr,
    WINDOWED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    k, v = load_keys(keys, n0, N, DK, DV, BN, MASKED, TMA)
    p = tl.exp2(product(q, k) * qk - lse[:, None])
    if MASKED:
        n = n0 + tl.arange(0, BN)
        p = tl.where(hide(n[None, :], t[:, None], N, WINDOW, STRIDE, OFFSET, WINDOWED), p, 0.0)
    ds = p * (product(do, v) - delta[:, None])
    return add_product(ds.to(k[0].dtype), k, dq)


@triton.jit(do_not_specialize=LENGTHS)
def strided_dq(
    Q, K, V, KD0, KD1, VD0, VD1, GRAD, LSE, DELTA, DQ, SEQUENCES, S, N, H, G, BG, WINDOW, qk, scale,
    STRIDE: tl.constexpr, OFFSET: tl.constexpr, h: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, LOOPS: tl.constexpr, WINDOWED: tl.constexpr, ADD: tl.constexpr, TMA: tl.constexpr, PACKED: tl.constexpr,
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
    t, there, rows = rows_of_tile(s0, first, S, H, g, h, BM)
    q = load_two(Q, rows * DK.d, there, DK, True)
    do = load_two(GRAD, rows * DV.d, there, DV, True)
    lse = tl.load(LSE + rows, mask=there, other=float("inf"))
    delta = tl.load(DELTA + rows, mask=there, other=0.0)
    keys = keys_at(K, V, KD0, KD1, VD0, VD1, key0, g, G, DK, DV)
    dq = zeros_two(BM, DK)
    start, inside, whole, end = parts_of_keys(
        first, tl.minimum(first + BQ, S) - 1, N, WINDOW, STRIDE, OFFSET, BN, LOOPS, WINDOWED
    )
    for part in tl.static_range(0, 3):
        if part == 2 or (LOOPS > 1 and (part == 1 or WINDOWED)):
            n_lo, n_hi = bounds_of(part, start, inside, whole, end)
            for n0 in tl.range(n_lo, n_hi, BN):
                dq = _dq_tile(
                    q, do, lse, delta, dq, n0, keys, t, N, WINDOW, qk, STRIDE, OFFSET, DK, DV, BN, part != 1, WINDOWED, TMA,
                )  # fmt: skip
    dq = scale_two(dq, scale)
    if ADD:
        dq = add_two(dq, load_two(DQ, rows * DK.d, there, DK, True), 1.0)
    store_two(DQ, rows * DK.d, there, dq, DK)


@triton.jit
def rows_give(p, v, dk, dv, q, do, delta):
    """Add to dk and dv what rows of gated probabilities p^T [keys, rows] give; return ds^T, too. All stays in registers, nothing
    is transposed.
    """
    dv = add_product(p.to(do[0].dtype), do, dv)
    ds = (p * (product(v, do) - delta[None, :])).to(q[0].dtype)
    return add_product(ds, q, dk), dv, ds


@triton.jit
def _segment_tile(
    k, v, dk, dv, r0, end, Q, GRAD, LSE, DELTA, token0, n, N, H, WINDOW, qk,
    STRIDE: tl.constexpr, OFFSET: tl.constexpr, h: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Add rows r0 ... r0 + BM - 1 of a sequence and group, counted over queries and heads, to the dk and dv of keys n."""
    r = r0 + tl.arange(0, BM)
    t = r // h
    there = r < end
    # 64 bits for the tile's first query, 32 from there.
    t0 = r0 // h
    base = (token0 + t0).to(tl.int64) * H
    row = (t - t0) * H + r % h
    q = load_two(Q + base * DK.d, row * DK.d, there, DK, MASKED)
    do = load_two(GRAD + base * DV.d, row * DV.d, there, DV, MASKED)
    if MASKED:
        lse = tl.load(LSE + base + row, mask=there, other=float("inf"))
        delta = tl.load(DELTA + base + row, mask=there, other=0.0)
    else:
        lse = tl.load(LSE + base + row)
        delta = tl.load(DELTA + base + row)
    p = tl.exp2(product(k, q) * qk - lse[None, :])
    if MASKED:
        p = tl.where(hide(n[:, None], t[None, :], N, WINDOW, STRIDE, OFFSET, WINDOWED), p, 0.0)
    dk, dv, _ = rows_give(p, v, dk, dv, q, do, delta)
    return dk, dv


# Where S is a multiple of 16, registers of an H100 hold more of its loops (kernels_compiled.json): another variant for that.
@triton.jit(do_not_specialize=[name for name in LENGTHS if name != "S"])
def strided_dkv(
    Q, K, V, GRAD, LSE, DELTA, OUT_K, OUT_V, SEQUENCES, S, N, H, G, BG, WINDOW, SEGMENT, keys, qk, scale,
    STRIDE: tl.constexpr, OFFSET: tl.constexpr, h: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, LOOPS: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr,
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
    k = load_two(K, at * DK.d, inside, DK, True)
    v = load_two(V, at * DV.d, inside, DV, True)
    dk, dv = zeros_two(BN, DK), zeros_two(BN, DV)
    at_q, at_grad = Q + g * h * DK.d, GRAD + g * h * DV.d
    at_lse, at_delta = LSE + g * h, DELTA + g * h
    # Rows that see all BN keys, in whole tiles: from ``clear`` to ``stop``.
    start, end = t_lo * h, tl.maximum(t_lo, t_end) * h
    clear = start
    stop = start
    if LOOPS > 1:
        whole_end = end
        if WINDOWED:
            whole_end = tl.minimum(end, (n_lo + WINDOW) * h)
        whole_end = tl.where(n_lo + BN <= N, whole_end, 0)
        clear = start + tl.cdiv(tl.maximum(start, (n_hi * STRIDE + OFFSET) * h) - start, BM) * BM
        stop = clear + tl.maximum(0, whole_end - clear) // BM * BM
    for part in tl.static_range(0, 3):
        if LOOPS > 1 or part == 2:
            r_lo, r_hi = bounds_of(part, start, clear, stop, end)
            for r0 in tl.range(r_lo, r_hi, BM):
                dk, dv = _segment_tile(
                    k, v, dk, dv, r0, end, at_q, at_grad, at_lse, at_delta, s0,
                    n, N, H, WINDOW, qk, STRIDE, OFFSET, h, DK, DV, BM, part != 1, WINDOWED,
                )  # fmt: skip
    at += segment.to(tl.int64) * keys * G
    store_two(OUT_K, at * DK.d, inside, scale_two(dk, scale), DK)
    store_two(OUT_V, at * DV.d, inside, dv, DV)


@triton.jit
def _sum(PARTS, OUT, row, rows, segments, D: tl.constexpr, BR: tl.constexpr):
    PD: tl.constexpr = D.whole
    column = tl.arange(0, PD)
    there = (row < rows)[:, None] & (column < D.d)[None, :]
    total = tl.zeros([BR, PD], tl.float32)
    at = PARTS + row[:, None] * D.d + column[None, :]
    for _ in range(segments):
        total += tl.load(at, mask=there, other=0.0)
        at += rows * D.d
    tl.store(OUT + row[:, None] * D.d + column[None, :], total.to(OUT.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=LENGTHS)
def sum_segments(PARTS_K, PARTS_V, OUT_K, OUT_V, rows, segments, DK: tl.constexpr, DV: tl.constexpr, BR: tl.constexpr):
    """Add the segments of dk and dv in order: parts [segments, rows, D] float32 to [rows, D]. Grid (rows / BR,)."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    _sum(PARTS_K, OUT_K, row, rows, segments, DK, BR)
    _sum(PARTS_V, OUT_V, row, rows, segments, DV, BR)
