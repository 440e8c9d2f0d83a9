"""Forward of the branches with keys at regular places: the window (Eq. 5, win) and the compressed blocks (Eq. 7).

Key n ends at token n * STRIDE + OFFSET and is visible to query t when that is not later and, under a window, t - n < WINDOW:
the window has stride 1 and offset 0, the compressed blocks stride d, offset l - 1 and no window. An online softmax over tiles
of keys, as in FlashAttention-2 (arXiv 2307.08691); a tile that all rows see whole has no masks (LOOPS).

Flat layouts (`rows`): q, o [T, H, D]; k, v [., G, D]; lse [T, H] float32, -inf where no key is visible.
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
    store_attention,
    tokens_of,
    visible_keys,
    zeros_two,
)


@triton.jit
def load_keys(
    at_k, at_v, KD0, KD1, VD0, VD1, n0, row, k_column, v_column, N, k_stride, v_stride,
    DK: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr,
    BN: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Load keys and values n0 ... n0 + BN - 1 of a sequence and group, in two parts each, by pointers or by TMA descriptors."""
    if TMA:
        k0 = KD0.load([row + n0, k_column])
        v0 = VD0.load([row + n0, v_column])
        if D1 > 0:
            k1 = KD1.load([row + n0, k_column + D0])
        else:
            k1 = k0
        if E1 > 0:
            v1 = VD1.load([row + n0, v_column + E0])
        else:
            v1 = v0
    else:
        n = n0 + tl.arange(0, BN)
        k0, k1 = load_two(at_k, n * k_stride, n < N, DK, D0, D1, MASKED)
        v0, v1 = load_two(at_v, n * v_stride, n < N, DV, E0, E1, MASKED)
    return k0, k1, v0, v1


@triton.jit
def hide(n, t, N, WINDOW, STRIDE: tl.constexpr, OFFSET: tl.constexpr, WINDOWED: tl.constexpr):
    """Return which of keys n and queries t (shaped to broadcast) see each other."""
    seen = (n * STRIDE + OFFSET <= t) & (n < N)
    if WINDOWED:
        seen = seen & (t - n < WINDOW)
    return seen


@triton.jit
def _forward_tile(
    q0, q1, acc0, acc1, total, top, n0, at_k, at_v, KD0, KD1, VD0, VD1, row, k_column, v_column, t, N, WINDOW,
    k_stride, v_stride, qk,
    STRIDE: tl.constexpr, OFFSET: tl.constexpr, DK: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr,
    E0: tl.constexpr, E1: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    k0, k1, v0, v1 = load_keys(
        at_k, at_v, KD0, KD1, VD0, VD1, n0, row, k_column, v_column, N, k_stride, v_stride, DK, D0, D1, DV, E0, E1, BN, MASKED, TMA,
    )  # fmt: skip
    s = product(q0, q1, k0, k1, D1, PRECISION)
    if MASKED:
        n = n0 + tl.arange(0, BN)
        s = tl.where(hide(n[None, :], t[:, None], N, WINDOW, STRIDE, OFFSET, WINDOWED), s, float("-inf"))
    # The maximum of raw scores, scaled (the scale is positive): then p is one multiplication and addition a score.
    new_top = tl.maximum(top, tl.max(s, 1) * qk)
    if MASKED:
        finite = tl.where(new_top == float("-inf"), 0.0, new_top)
    else:
        finite = new_top
    p = tl.exp2(s * qk - finite[:, None])
    shrink = tl.exp2(top - finite)
    total = total * shrink + tl.sum(p, 1)
    acc0 = acc0 * shrink[:, None]
    if E1 > 0:
        acc1 = acc1 * shrink[:, None]
    acc0, acc1 = add_product(p.to(v0.dtype), v0, v1, acc0, acc1, E1, PRECISION)
    return acc0, acc1, total, new_top


@triton.jit(do_not_specialize=LENGTHS)
def strided_forward(
    Q, K, V, KD0, KD1, VD0, VD1, O, LSE, SEQUENCES, S, N, H, G, BG, WINDOW, qk,
    STRIDE: tl.constexpr, OFFSET: tl.constexpr, h: tl.constexpr, DK: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    DV: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, LOOPS: tl.constexpr,
    WINDOWED: tl.constexpr, TMA: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend with BM // h queries of a group, the last ones first, as they see most. Grid (tiles * BG,).

    LOOPS: 1 masks every tile of keys; 2 those at the end alone and, under a window, at the beginning.
    """
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
    at_k, at_v = K + (key0.to(tl.int64) * G + g) * DK, V + (key0.to(tl.int64) * G + g) * DV
    acc0, acc1 = zeros_two(BM, E0, E1)
    total = tl.zeros([BM], tl.float32)
    top = tl.full([BM], float("-inf"), tl.float32)
    last = tl.minimum(first + BQ, S) - 1
    end = visible_keys(last, N, STRIDE, OFFSET)
    start = tl.maximum(0, first - WINDOW + 1)
    if LOOPS > 1:
        whole = visible_keys(first, N, STRIDE, OFFSET)
        if WINDOWED:
            inside = start + tl.cdiv(tl.maximum(0, last - WINDOW + 1) - start, BN) * BN
            for n0 in tl.range(start, tl.minimum(inside, end), BN):
                acc0, acc1, total, top = _forward_tile(
                    q0, q1, acc0, acc1, total, top, n0, at_k, at_v, KD0, KD1, VD0, VD1, key0, g * DK, g * DV, t, N, WINDOW,
                    G * DK, G * DV, qk, STRIDE, OFFSET, DK, D0, D1, DV, E0, E1, BN, True, WINDOWED, TMA, PRECISION,
                )  # fmt: skip
            start = inside
        stop = start + tl.maximum(0, whole - start) // BN * BN
        for n0 in tl.range(start, stop, BN):
            acc0, acc1, total, top = _forward_tile(
                q0, q1, acc0, acc1, total, top, n0, at_k, at_v, KD0, KD1, VD0, VD1, key0, g * DK, g * DV, t, N, WINDOW,
                G * DK, G * DV, qk, STRIDE, OFFSET, DK, D0, D1, DV, E0, E1, BN, False, WINDOWED, TMA, PRECISION,
            )  # fmt: skip
        start = stop
    for n0 in tl.range(start, end, BN):
        acc0, acc1, total, top = _forward_tile(
            q0, q1, acc0, acc1, total, top, n0, at_k, at_v, KD0, KD1, VD0, VD1, key0, g * DK, g * DV, t, N, WINDOW,
            G * DK, G * DV, qk, STRIDE, OFFSET, DK, D0, D1, DV, E0, E1, BN, True, WINDOWED, TMA, PRECISION,
        )  # fmt: skip
    store_attention(O, LSE, rows, there, acc0, acc1, total, top, DV, E0, E1)
