"""Forward of the branches with keys at regular places: the window (Eq. 5, win) and the compressed blocks (Eq. 7).

Key n ends at token n * STRIDE + OFFSET and is visible to query t when that is not later and, under a window, t - n < WINDOW:
the window has stride 1 and offset 0, the compressed blocks stride d, offset l - 1 and no window. An online softmax over tiles
of keys, as in FlashAttention-2 (arXiv 2307.08691); a tile that all rows see whole has no masks (LOOPS).

Flat layouts (`rows`): q, o [T, H, D]; k, v [., G, D]; lse [T, H] float32, -inf where no key is visible.
"""

import triton
import triton.language as tl

from nsa.kernels.triton.rows import (
    LENGTHS,
    add_product,
    bounds_of,
    keys_of,
    load_described,
    load_two,
    product,
    rows_of_tile,
    scale_two,
    store_attention,
    tokens_of,
    visible_keys,
    zeros_two,
)


@triton.jit
def keys_at(K, V, KD0, KD1, VD0, VD1, key0, g, G, DK: tl.constexpr, DV: tl.constexpr):
    """Return where the keys and values of a sequence and group are: their addresses, and a row and columns for descriptors."""
    at = key0.to(tl.int64) * G + g
    return (K + at * DK.d, V + at * DV.d), (KD0, KD1, VD0, VD1), (key0, g * DK.d, g * DV.d), (G * DK.d, G * DV.d)


@triton.jit
def load_keys(
    keys, n0, N, DK: tl.constexpr, DV: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr
):
    """Load keys and values n0 ... n0 + BN - 1 of `keys_at`, each in parts, by pointers or by TMA descriptors."""
    at, described, place, stride = keys
    if TMA:
        k = load_described(described[0], described[1], place[0] + n0, place[1], DK)
        v = load_described(described[2], described[3], place[0] + n0, place[2], DV)
    else:
        n = n0 + tl.arange(0, BN)
        k = load_two(at[0], n * stride[0], n < N, DK, MASKED)
        v = load_two(at[1], n * stride[1], n < N, DV, MASKED)
    return k, v


@triton.jit
def hide(n, t, N, WINDOW, STRIDE: tl.constexpr, OFFSET: tl.constexpr, WINDOWED: tl.constexpr):
    """Return which of keys n and queries t (shaped to broadcast) see each other."""
    seen = (n * STRIDE + OFFSET <= t) & (n < N)
    if WINDOWED:
        seen = seen & (t - n < WINDOW)
    return seen


@triton.jit
def parts_of_keys(
    first, last, N, WINDOW,
    STRIDE: tl.constexpr, OFFSET: tl.constexpr, BN: tl.constexpr, LOOPS: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Return the keys that queries first ... last see, in three parts of tiles, by their ends: start, inside, whole, end.

    All queries see the keys of the second part. LOOPS: 1 leaves it empty; under a window alone the first has any.
    """
    start = tl.maximum(0, first - WINDOW + 1)
    inside = start
    if LOOPS > 1 and WINDOWED:
        inside = start + tl.cdiv(tl.maximum(0, last - WINDOW + 1) - start, BN) * BN
    whole = inside
    if LOOPS > 1:
        whole = inside + tl.maximum(0, visible_keys(first, N, STRIDE, OFFSET) - inside) // BN * BN
    return start, inside, whole, visible_keys(last, N, STRIDE, OFFSET)


@triton.jit
def _forward_tile(
    q, acc, total, top, n0, keys, t, N, WINDOW, qk,
    STRIDE: tl.constexpr, OFFSET: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr,
    WINDOWED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    k, v = load_keys(keys, n0, N, DK, DV, BN, MASKED, TMA)
    s = product(q, k)
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
    acc = add_product(p.to(v[0].dtype), v, scale_two(acc, shrink[:, None]))
    return acc, total, new_top


@triton.jit(do_not_specialize=LENGTHS)
def strided_forward(
    Q, K, V, KD0, KD1, VD0, VD1, O, LSE, SEQUENCES, S, N, H, G, BG, WINDOW, qk,
    STRIDE: tl.constexpr, OFFSET: tl.constexpr, h: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, LOOPS: tl.constexpr, WINDOWED: tl.constexpr, TMA: tl.constexpr, PACKED: tl.constexpr,
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
    t, there, rows = rows_of_tile(s0, first, S, H, g, h, BM)
    q = load_two(Q, rows * DK.d, there, DK, True)
    keys = keys_at(K, V, KD0, KD1, VD0, VD1, key0, g, G, DK, DV)
    acc = zeros_two(BM, DV)
    total = tl.zeros([BM], tl.float32)
    top = tl.full([BM], float("-inf"), tl.float32)
    start, inside, whole, end = parts_of_keys(
        first, tl.minimum(first + BQ, S) - 1, N, WINDOW, STRIDE, OFFSET, BN, LOOPS, WINDOWED
    )
    for part in tl.static_range(0, 3):
        if part == 2 or (LOOPS > 1 and (part == 1 or WINDOWED)):
            n_lo, n_hi = bounds_of(part, start, inside, whole, end)
            for n0 in tl.range(n_lo, n_hi, BN):
                acc, total, top = _forward_tile(
                    q, acc, total, top, n0, keys, t, N, WINDOW, qk, STRIDE, OFFSET, DK, DV, BN, part != 1, WINDOWED, TMA,
                )  # fmt: skip
    store_attention(O, LSE, rows, there, acc, total, top, DV)
