"""dk and dv of the window and the compressed branch for Hopper, in Gluon: rows of queries arrive by TMA, products overlap.

It computes what `strided_backward.strided_dkv` does. A program has 128 keys of a group and three groups of warps: one warp loads
tiles of BM rows (query, head) of q and of the gradient into a ring of STAGES, as `selection_forward_tma` does; two consumers of
four warps have 64 keys each and take every tile. v do^T runs during the exponentials of a tile, p^T do during the rest of ds.
Nothing orders the consumers, so one's products run under the other's exponentials, too.

Flat layouts (`rows`), bfloat16 or float16, head dims that are multiples of WIDTH, groups of 8 to 64 heads, a power of two.
"""

from __future__ import annotations

from selection_forward_tma import WIDTH
from strided_dq_overlapped import store_columns
from strided_overlapped import CONSUMERS, ROWS, barriers, load_columns, load_tile, place_of
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

KEYS = gl.constexpr(ROWS.value * CONSUMERS.value)  # of a program


@gluon.jit
def load_rows(
    QD, GD, q, grad, there, free, row, tiles, H, h: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, BM: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Load q and the gradient of the queries from ``row`` on, BM // h a tile, as the ring becomes free."""
    for j in range(tiles):
        at = j % STAGES
        mbarrier.wait(free.index(at), j // STAGES % 2 ^ 1)
        mbarrier.expect(there.index(at), BM * (DK + DV) * 2)
        for query in gl.static_range(BM // h):
            first = row + (j * (BM // h) + query) * H
            for part in gl.static_range(DK // WIDTH):
                target = q.index(at * (DK // WIDTH) + part).slice(query * h, h)
                load_tile(QD, [first, part * WIDTH], there.index(at), target)
            for part in gl.static_range(DV // WIDTH):
                target = grad.index(at * (DV // WIDTH) + part).slice(query * h, h)
                load_tile(GD, [first, part * WIDTH], there.index(at), target)


@gluon.jit
def products_of(keys, rows, consumer, at, D: gl.constexpr, BM: gl.constexpr, S_LAYOUT: gl.constexpr):
    """Start the products of a consumer's keys with a stage's rows, transposed [ROWS, BM]."""
    PARTS: gl.constexpr = D // WIDTH
    s = gl.zeros([ROWS, BM], gl.float32, S_LAYOUT)
    for part in gl.static_range(PARTS):
        rows_of_part = rows.index(at * PARTS + part).permute((1, 0))
        s = warpgroup_mma(keys.index(consumer * PARTS + part), rows_of_part, s, use_acc=part > 0, is_async=True)
    return s


@gluon.jit
def add_products(x, rows, at, totals, D: gl.constexpr):
    """Start totals + x rows, WIDTH columns each."""
    PARTS: gl.constexpr = D // WIDTH
    found = ()
    for part in gl.static_range(PARTS):
        found = found + (warpgroup_mma(x, rows.index(at * PARTS + part), totals[part], is_async=True),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@gluon.jit
def zeros_of(D: gl.constexpr, O_LAYOUT: gl.constexpr):
    """Return zeros [ROWS, WIDTH] for each part of D columns."""
    found = ()
    for _part in gl.static_range(D // WIDTH):
        found = found + (gl.zeros([ROWS, WIDTH], gl.float32, O_LAYOUT),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@gluon.jit
def add_rows(
    lo, hi, dk, dv, consumer, LSE, DELTA, k, v, q, grad, there, free, t_lo, t_end, n, s0, H, g, WINDOW, qk, STRIDE: gl.constexpr,
    OFFSET: gl.constexpr, h: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr,
    MASKED: gl.constexpr, WINDOWED: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Add what tiles lo ... hi - 1 of rows give to dk and dv of keys n."""
    PARTS_V: gl.constexpr = DV // WIDTH
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    OF_ROWS: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    # Loads have an address a thread, as long as they are under way.
    r = gl.arange(0, BM, gl.BlockedLayout([1], [32], [4], [0]))
    for j in range(lo, hi):
        at = j % STAGES
        t = t_lo + j * (BM // h)
        row = (s0 + t + r // h).to(gl.int64) * H + g * h + r % h
        there_r = r < (t_end - t) * h
        if MASKED:
            lse = gl.load(LSE + row, mask=there_r, other=float("inf"))
            delta = gl.load(DELTA + row, mask=there_r, other=0.0)
        else:
            lse, delta = gl.load(LSE + row), gl.load(DELTA + row)
        mbarrier.wait(there.index(at), j // STAGES % 2)
        s = products_of(k, q, consumer, at, DK, BM, S_LAYOUT)
        dp = products_of(v, grad, consumer, at, DV, BM, S_LAYOUT)
        lse = gl.convert_layout(lse, OF_ROWS)[None, :]
        p = gl.exp2(warpgroup_mma_wait(PARTS_V, deps=[s]) * qk - lse)
        if MASKED:
            of_row = (t + gl.arange(0, BM, OF_ROWS) // h)[None, :]
            seen = n[:, None] * STRIDE + OFFSET <= of_row
            if WINDOWED:
                seen = seen & (of_row - n[:, None] < WINDOW)
            p = gl.where(seen, p, 0.0)
        dv = add_products(gl.convert_layout(p.to(v.dtype), OPERAND), grad, at, dv, DV)
        ds = p * (warpgroup_mma_wait(PARTS_V, deps=[dp]) - gl.convert_layout(delta, OF_ROWS)[None, :])
        dk = add_products(gl.convert_layout(ds.to(k.dtype), OPERAND), q, at, dk, DK)
        both = warpgroup_mma_wait(0, deps=dv + dk)
        dv, dk = both[:PARTS_V], both[PARTS_V:]
        mbarrier.arrive(free.index(at), count=1)
    return dk, dv


@gluon.jit
def consume(
    consumer, K, V, LSE, DELTA, OUT_K, OUT_V, k, v, q, grad, there, free, n_lo, t_lo, t_end, inside, whole, tiles, s0, key0, before,
    N, H, G, g, WINDOW, qk, scale, STRIDE: gl.constexpr, OFFSET: gl.constexpr, h: gl.constexpr, DK: gl.constexpr,
    DV: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """Write what all tiles of rows give to a consumer's keys: masked before ``inside`` and from ``whole`` on."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16]
    )
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    first = n_lo + consumer * ROWS
    n = first + gl.arange(0, ROWS, gl.SliceLayout(1, LINES))
    at = (key0 + n).to(gl.int64) * G + g
    for part in gl.static_range(DK // WIDTH):
        load_columns(k.index(consumer * (DK // WIDTH) + part), K + at * DK, n < N, part * WIDTH, WIDTH, LINES)
    for part in gl.static_range(DV // WIDTH):
        load_columns(v.index(consumer * (DV // WIDTH) + part), V + at * DV, n < N, part * WIDTH, WIDTH, LINES)
    fence_async_shared()
    dk, dv = zeros_of(DK, O_LAYOUT), zeros_of(DV, O_LAYOUT)
    n = first + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
    dk, dv = add_rows(
        0, inside, dk, dv, consumer, LSE, DELTA, k, v, q, grad, there, free, t_lo, t_end, n, s0, H, g, WINDOW, qk, STRIDE, OFFSET,
        h, DK, DV, BM, STAGES, True, WINDOWED, S_LAYOUT, O_LAYOUT,
    )  # fmt: skip
    dk, dv = add_rows(
        inside, whole, dk, dv, consumer, LSE, DELTA, k, v, q, grad, there, free, t_lo, t_end, n, s0, H, g, WINDOW, qk, STRIDE,
        OFFSET, h, DK, DV, BM, STAGES, False, WINDOWED, S_LAYOUT, O_LAYOUT,
    )  # fmt: skip
    dk, dv = add_rows(
        whole, tiles, dk, dv, consumer, LSE, DELTA, k, v, q, grad, there, free, t_lo, t_end, n, s0, H, g, WINDOW, qk, STRIDE,
        OFFSET, h, DK, DV, BM, STAGES, True, WINDOWED, S_LAYOUT, O_LAYOUT,
    )  # fmt: skip
    n = first + gl.arange(0, ROWS, gl.SliceLayout(1, O_LAYOUT))
    at = (before + key0 + n).to(gl.int64) * G + g
    for part in gl.static_range(DK // WIDTH):
        store_columns(
            dk[part], OUT_K + at * DK, n < N, scale, OUT_K.dtype.element_ty, part * WIDTH, WIDTH, False, O_LAYOUT
        )
    for part in gl.static_range(DV // WIDTH):
        store_columns(
            dv[part], OUT_V + at * DV, n < N, 1.0, OUT_V.dtype.element_ty, part * WIDTH, WIDTH, False, O_LAYOUT
        )


@gluon.jit
def strided_dkv_overlapped(
    QD, K, V, GD, LSE, DELTA, OUT_K, OUT_V, SEQUENCES, S, N, H, G, BG, WINDOW, SEGMENT, keys, qk, scale,
    STRIDE: gl.constexpr, OFFSET: gl.constexpr, h: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, BM: gl.constexpr,
    STAGES: gl.constexpr, WINDOWED: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Write what the queries of a segment give to KEYS keys of a group. Grid (tiles of keys * BG, segments)."""
    BQ: gl.constexpr = BM // h
    dtype: gl.constexpr = QD.dtype
    b, g = gl.program_id(0) % BG // G, gl.program_id(0) % BG % G
    n_lo, segment = gl.program_id(0) // BG * KEYS, gl.program_id(1)
    s0, S, key0, N = place_of(SEQUENCES, b, S, N, WINDOWED, PACKED)
    if n_lo >= N:
        return
    n_hi = gl.minimum(n_lo + KEYS, N) - 1
    t_lo = gl.maximum(n_lo * STRIDE + OFFSET, segment * SEGMENT)
    t_end = gl.minimum(S, (segment + 1) * SEGMENT)
    if WINDOWED:
        t_end = gl.minimum(t_end, n_hi + WINDOW)
    # Queries from ``inside`` tiles on see all keys up to n_hi; those before ``whole`` tiles see n_lo, too, and are there.
    queries = gl.maximum(t_end - t_lo, 0)
    tiles = gl.cdiv(queries, BQ)
    inside = gl.minimum(gl.cdiv(gl.maximum(n_hi * STRIDE + OFFSET - t_lo, 0), BQ), tiles)
    if WINDOWED:
        queries = gl.minimum(queries, gl.maximum(n_lo + WINDOW - t_lo, 0))
    whole = gl.maximum(queries // BQ, inside)
    shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], dtype)
    k = gl.allocate_shared_memory(dtype, [CONSUMERS * (DK // WIDTH), ROWS, WIDTH], shared)
    v = gl.allocate_shared_memory(dtype, [CONSUMERS * (DV // WIDTH), ROWS, WIDTH], shared)
    q = gl.allocate_shared_memory(dtype, [STAGES * (DK // WIDTH), BM, WIDTH], shared)
    grad = gl.allocate_shared_memory(dtype, [STAGES * (DV // WIDTH), BM, WIDTH], shared)
    there, free = barriers(STAGES, CONSUMERS)
    fence_async_shared()
    gl.warp_specialize(
        [
            (consume, (
                0, K, V, LSE, DELTA, OUT_K, OUT_V, k, v, q, grad, there, free, n_lo, t_lo, t_end, inside, whole, tiles, s0, key0,
                segment * keys, N, H, G, g, WINDOW, qk, scale, STRIDE, OFFSET, h, DK, DV, BM, STAGES, WINDOWED,
            )),
            (consume, (
                1, K, V, LSE, DELTA, OUT_K, OUT_V, k, v, q, grad, there, free, n_lo, t_lo, t_end, inside, whole, tiles, s0, key0,
                segment * keys, N, H, G, g, WINDOW, qk, scale, STRIDE, OFFSET, h, DK, DV, BM, STAGES, WINDOWED,
            )),
            (load_rows, (QD, GD, q, grad, there, free, (s0 + t_lo) * H + g * h, tiles, H, h, DK, DV, BM, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
