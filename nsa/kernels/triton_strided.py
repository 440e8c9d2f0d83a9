"""Triton kernels of the branches whose keys lie at regular places: the window, and the compressed blocks.

Key n is visible to query t when n * STRIDE + OFFSET <= t and t - n < WINDOW: the window has stride 1 and offset 0, the compressed
blocks have stride d, offset l - 1 (their last token) and no window. Forward and backward follow FlashAttention-2 (arXiv
2307.08691): an online softmax; one kernel for dq, over keys; one for dk and dv, over the queries of a group's heads. Nobody adds to
what another program adds to, so every run gives the same bits.

Layouts, all contiguous: q, o [B, S, H, D]; k, v [B, N, G, D]; lse, delta [B, S, H] float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_rows(base, rows, there, width: tl.constexpr, padded: tl.constexpr):
    """[len(rows), padded] from rows that are ``width`` long; zero where ``there`` is false."""
    column = tl.arange(0, padded)
    at = base + rows.to(tl.int64)[:, None] * width + column[None, :]
    return tl.load(at, mask=there[:, None] & (column < width)[None, :], other=0.0)


@triton.jit
def store_rows(base, rows, there, value, width: tl.constexpr, padded: tl.constexpr):
    """What `load_rows` reads, written in the pointer's dtype."""
    column = tl.arange(0, padded)
    at = base + rows.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(at, value.to(base.dtype.element_ty), mask=there[:, None] & (column < width)[None, :])


@triton.jit
def online_softmax(scores, top, total, acc):
    """Take a tile of scores (base 2, -inf where hidden) into the running maximum and sum; returns them, acc scaled, and p."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    finite = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.exp2(scores - finite[:, None])
    shrink = tl.exp2(top - finite)
    return new_top, total * shrink + tl.sum(p, 1), acc * shrink[:, None], p


@triton.jit
def row_dot(A, B, OUT, rows, WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr):
    """OUT[r] = sum over a row of A * B, in float32: delta, from the output and its gradient."""
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = load_rows(A, r, r < rows, WIDTH, PADDED).to(tl.float32)
    b = load_rows(B, r, r < rows, WIDTH, PADDED).to(tl.float32)
    tl.store(OUT + r, tl.sum(a * b, 1), mask=r < rows)


@triton.jit
def visible(t, n, N, STRIDE: tl.constexpr, OFFSET: tl.constexpr, WINDOW):
    """[len(t), len(n)]: which query sees which key."""
    back = t[:, None] - n[None, :]
    return (n[None, :] < N) & (n[None, :] * STRIDE + OFFSET <= t[:, None]) & (back < WINDOW)


@triton.jit
def keys_of(first, S, N, STRIDE: tl.constexpr, OFFSET: tl.constexpr, WINDOW, BM: tl.constexpr, BN: tl.constexpr):
    """The range of keys, from a multiple of BN, that any of the queries first ... first + BM - 1 sees."""
    last = tl.minimum(first + BM, S) - 1
    end = tl.where(last >= OFFSET, tl.minimum(N, (last - OFFSET) // STRIDE + 1), 0)
    return tl.maximum(0, first - WINDOW + 1) // BN * BN, end


@triton.jit
def strided_forward(
    Q, K, V, O, LSE, S, N, H, G, WINDOW, scale,
    STRIDE: tl.constexpr, OFFSET: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PK: tl.constexpr, PV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program: BM queries of one head. Grid (S / BM, B * H)."""
    first = tl.program_id(0) * BM
    b, head = tl.program_id(1) // H, tl.program_id(1) % H
    g = head // (H // G)
    t = first + tl.arange(0, BM)
    rows = (b * S + t) * H + head
    q = load_rows(Q, rows, t < S, DK, PK)
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, PV], tl.float32)
    start, end = keys_of(first, S, N, STRIDE, OFFSET, WINDOW, BM, BN)
    for n0 in range(start, end, BN):
        n = n0 + tl.arange(0, BN)
        keys = (b * N + n) * G + g
        k = load_rows(K, keys, n < N, DK, PK)
        v = load_rows(V, keys, n < N, DV, PV)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E)
        scores = tl.where(visible(t, n, N, STRIDE, OFFSET, WINDOW), scores, float("-inf"))
        top, total, acc, p = online_softmax(scores, top, total, acc)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    some = total > 0
    acc = acc / tl.where(some, total, 1.0)[:, None]
    store_rows(O, rows, t < S, acc, DV, PV)
    lse = tl.where(some, (top + tl.log2(tl.where(some, total, 1.0))) / LOG2E, float("-inf"))
    tl.store(LSE + rows, lse, mask=t < S)


@triton.jit
def strided_dq(
    Q, K, V, DO, LSE, DELTA, DQ, S, N, H, G, WINDOW, scale,
    STRIDE: tl.constexpr, OFFSET: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PK: tl.constexpr, PV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program: dq of BM queries of one head. Grid (S / BM, B * H)."""
    first = tl.program_id(0) * BM
    b, head = tl.program_id(1) // H, tl.program_id(1) % H
    g = head // (H // G)
    t = first + tl.arange(0, BM)
    rows = (b * S + t) * H + head
    q = load_rows(Q, rows, t < S, DK, PK)
    do = load_rows(DO, rows, t < S, DV, PV)
    lse = tl.load(LSE + rows, mask=t < S, other=0.0)
    delta = tl.load(DELTA + rows, mask=t < S, other=0.0)
    dq = tl.zeros([BM, PK], tl.float32)
    start, end = keys_of(first, S, N, STRIDE, OFFSET, WINDOW, BM, BN)
    for n0 in range(start, end, BN):
        n = n0 + tl.arange(0, BN)
        keys = (b * N + n) * G + g
        k = load_rows(K, keys, n < N, DK, PK)
        v = load_rows(V, keys, n < N, DV, PV)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        seen = visible(t, n, N, STRIDE, OFFSET, WINDOW)
        p = tl.where(seen, tl.exp2((scores - lse[:, None]) * LOG2E), 0.0)
        ds = p * (tl.dot(do, tl.trans(v), input_precision=PRECISION) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    store_rows(DQ, rows, t < S, dq * scale, DK, PK)


@triton.jit
def strided_dkv(
    Q, K, V, DO, LSE, DELTA, OUT_K, OUT_V, S, N, H, G, WINDOW, scale,
    STRIDE: tl.constexpr, OFFSET: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PK: tl.constexpr, PV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program: dk and dv of BN keys, from all heads of their group. Grid (N / BN, B * G)."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    b, g = tl.program_id(1) // G, tl.program_id(1) % G
    keys = (b * N + n) * G + g
    k = load_rows(K, keys, n < N, DK, PK)
    v = load_rows(V, keys, n < N, DV, PV)
    dk = tl.zeros([BN, PK], tl.float32)
    dv = tl.zeros([BN, PV], tl.float32)
    start = (tl.program_id(0) * BN * STRIDE + OFFSET) // BM * BM
    end = tl.minimum(S, tl.program_id(0) * BN + BN - 1 + WINDOW)
    for head in range(g * (H // G), (g + 1) * (H // G)):
        for first in range(start, end, BM):
            t = first + tl.arange(0, BM)
            rows = (b * S + t) * H + head
            q = load_rows(Q, rows, t < S, DK, PK)
            do = load_rows(DO, rows, t < S, DV, PV)
            lse = tl.load(LSE + rows, mask=t < S, other=0.0)
            delta = tl.load(DELTA + rows, mask=t < S, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            seen = visible(t, n, N, STRIDE, OFFSET, WINDOW) & (t < S)[:, None]
            p = tl.where(seen, tl.exp2((scores - lse[:, None]) * LOG2E), 0.0)
            dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
            ds = p * (tl.dot(do, tl.trans(v), input_precision=PRECISION) - delta[:, None])
            dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)
    store_rows(OUT_K, keys, n < N, dk * scale, DK, PK)
    store_rows(OUT_V, keys, n < N, dv, DV, PV)


@triton.jit
def block_importance(
    Q, K, LSE, OUT, S, N, H, G, n_blocks, scale,
    STRIDE: tl.constexpr, OFFSET: tl.constexpr, A: tl.constexpr, R: tl.constexpr, DK: tl.constexpr, PK: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BJ: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Importance of BJ selection blocks to BM queries of a group (Eq. 8 to 10): probabilities, which the log-sum-exp makes from
    scores, times the strides that a compressed block (A strides) and a selection block (R strides) share, summed over the heads.
    Grid (S / BM, Ns / BJ, B * G).
    """
    first, j0 = tl.program_id(0) * BM, tl.program_id(1) * BJ
    b, g = tl.program_id(2) // G, tl.program_id(2) % G
    t = first + tl.arange(0, BM)
    j = j0 + tl.arange(0, BJ)
    found = tl.zeros([BM, BJ], tl.float32)
    _, end = keys_of(first, S, N, STRIDE, OFFSET, 1 << 30, BM, BN)
    end = tl.minimum(end, (j0 + BJ) * R)
    for n0 in range(tl.maximum(0, j0 * R - (A - 1)), end, BN):
        n = n0 + tl.arange(0, BN)
        k = load_rows(K, (b * N + n) * G + g, n < N, DK, PK)
        seen = visible(t, n, N, STRIDE, OFFSET, 1 << 30) & (t < S)[:, None]
        p = tl.zeros([BM, BN], tl.float32)
        for head in range(g * (H // G), (g + 1) * (H // G)):
            rows = (b * S + t) * H + head
            q = load_rows(Q, rows, t < S, DK, PK)
            lse = tl.load(LSE + rows, mask=t < S, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            p += tl.where(seen, tl.exp2((scores - lse[:, None]) * LOG2E), 0.0)
        shared = tl.minimum(n[:, None] + A, (j[None, :] + 1) * R) - tl.maximum(n[:, None], j[None, :] * R)
        found = tl.dot(p, tl.maximum(shared, 0).to(tl.float32), found, input_precision="ieee")
    at = OUT + ((b * S + t) * G + g).to(tl.int64)[:, None] * n_blocks + j[None, :]
    tl.store(at, found, mask=(t < S)[:, None] & (j < n_blocks)[None, :])
