"""dq of the window and the compressed branch for Hopper, in Gluon: products run during the exponentials of a tile.

It computes what `strided_backward.strided_dq` does, with the warps and the ring of `strided_overlapped`. A consumer starts this
tile's product of gradients and values and the next tile's scores, makes this one's probabilities again, then adds ds k.

Flat layouts (`rows`), bfloat16 or float16, head dims that nothing pads; keys and values are TMA descriptors (`launch`).
"""

from __future__ import annotations

from strided_overlapped import (
    CONSUMERS,
    ROWS,
    empty_ring,
    is_seen,
    load_columns,
    load_tiles,
    place_of,
    rows_of,
    shared_rows,
    start_scores,
    tiles_of,
    two_parts,
)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def start_gradients(do, values, j, BN: gl.constexpr, STAGES: gl.constexpr, S_LAYOUT: gl.constexpr):
    """Start do v^T with tile j [ROWS, BN], once its values are there."""
    v, v_there = values
    at = j % STAGES
    mbarrier.wait(v_there.index(at), j // STAGES % 2)
    dp = gl.zeros([ROWS, BN], gl.float32, S_LAYOUT)
    return warpgroup_mma(do, v.index(at).permute((1, 0)), dp, use_acc=False, is_async=True)


@gluon.jit
def probabilities(
    s, lse, n0, t, N, WINDOW, qk, STRIDE: gl.constexpr, OFFSET: gl.constexpr, BN: gl.constexpr, MASKED: gl.constexpr,
    WINDOWED: gl.constexpr, S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Return the gated probabilities of a tile of scores."""
    p = gl.exp2(s * qk - lse[:, None])
    if MASKED:
        p = gl.where(is_seen(n0, t, N, WINDOW, STRIDE, OFFSET, BN, WINDOWED, S_LAYOUT), p, 0.0)
    return p


@gluon.jit
def start_dq(
    p, dp, delta, dq0, dq1, keys, j, D1: gl.constexpr, STAGES: gl.constexpr, O_LAYOUT: gl.constexpr
):  # fmt: skip
    """Start dq + ds k with tile j."""
    k0, k1, _there = keys
    ds = gl.convert_layout((p * (dp - delta[:, None])).to(k0.dtype), gl.DotOperandLayout(0, O_LAYOUT, 2))
    dq0 = warpgroup_mma(ds, k0.index(j % STAGES), dq0, is_async=True)
    if D1 > 0:
        dq1 = warpgroup_mma(ds, k1.index(j % STAGES), dq1, is_async=True)
    return dq0, dq1


@gluon.jit
def add_tiles(
    lo, hi, s, dq0, dq1, q0, q1, do, lse, delta, keys, values, k_free, v_free, start, t, N, WINDOW, qk, STRIDE: gl.constexpr,
    OFFSET: gl.constexpr, D1: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
    WINDOWED: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Add tiles lo ... hi - 1, of which ``s`` has the first one's scores; return those of tile hi, and dq."""
    PRODUCTS: gl.constexpr = 2 if D1 > 0 else 1  # of the next tile's scores
    for j in range(lo, hi):
        dp = start_gradients(do, values, j, BN, STAGES, S_LAYOUT)
        following = start_scores(q0, q1, keys, j + 1, D1, BN, STAGES, S_LAYOUT)
        p = probabilities(s, lse, start + j * BN, t, N, WINDOW, qk, STRIDE, OFFSET, BN, MASKED, WINDOWED, S_LAYOUT)
        dp = warpgroup_mma_wait(PRODUCTS, deps=[dp])
        mbarrier.arrive(v_free.index(j % STAGES), count=1)
        dq0, dq1 = start_dq(p, dp, delta, dq0, dq1, keys, j, D1, STAGES, O_LAYOUT)
        if D1 > 0:
            s, dq0, dq1 = warpgroup_mma_wait(0, deps=[following, dq0, dq1])
        else:
            s, dq0 = warpgroup_mma_wait(0, deps=[following, dq0])
        mbarrier.arrive(k_free.index(j % STAGES), count=1)
    return s, dq0, dq1


@gluon.jit
def store_columns(
    x,
    where,
    there,
    scale,
    dtype: gl.constexpr,
    FIRST: gl.constexpr,
    WIDTH: gl.constexpr,
    ADD: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Store x * scale to columns FIRST ... FIRST + WIDTH - 1 of rows; if ADD, added to what they hold."""
    at = where[:, None] + (FIRST + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT)))[None, :]
    x = x * scale
    if ADD:
        x += gl.load(at, mask=there[:, None], other=0.0).to(gl.float32)
    gl.store(at, x.to(dtype), mask=there[:, None])


@gluon.jit
def consume(
    consumer, Q, GRAD, LSE, DELTA, DQ, q0s, q1s, dos, keys, values, k_free, v_free, start, tiles, inside, whole, first, s0, S, N,
    H, g, WINDOW, qk, scale, STRIDE: gl.constexpr, OFFSET: gl.constexpr, h: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr,
    DV: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, WINDOWED: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """Write dq of a consumer's rows."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D0, 16])
    P_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D1 if D1 > 0 else D0, 16]
    )
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    q0, q1, do = q0s.index(consumer), q1s.index(consumer), dos.index(consumer)
    _queries, rows, there = rows_of(consumer, first, s0, S, H, g, h, LINES)
    load_columns(q0, Q + rows * (D0 + D1), there, 0, D0, LINES)
    if D1 > 0:
        load_columns(q1, Q + rows * (D0 + D1), there, D0, D1, LINES)
    load_columns(do, GRAD + rows * DV, there, 0, DV, LINES)
    fence_async_shared()
    t, rows, there = rows_of(consumer, first, s0, S, H, g, h, S_LAYOUT)
    lse = gl.load(LSE + rows, mask=there, other=float("inf"))
    delta = gl.load(DELTA + rows, mask=there, other=0.0)
    dq0 = gl.zeros([ROWS, D0], gl.float32, O_LAYOUT)
    dq1 = 0.0
    if D1 > 0:
        dq1 = gl.zeros([ROWS, D1], gl.float32, P_LAYOUT)
    if tiles > 0:
        last = tiles - 1
        s = warpgroup_mma_wait(0, deps=[start_scores(q0, q1, keys, 0, D1, BN, STAGES, S_LAYOUT)])
        if WINDOWED:
            s, dq0, dq1 = add_tiles(
                0, inside, s, dq0, dq1, q0, q1, do, lse, delta, keys, values, k_free, v_free, start, t, N, WINDOW, qk, STRIDE,
                OFFSET, D1, BN, STAGES, True, WINDOWED, S_LAYOUT, O_LAYOUT,
            )  # fmt: skip
        s, dq0, dq1 = add_tiles(
            inside, whole, s, dq0, dq1, q0, q1, do, lse, delta, keys, values, k_free, v_free, start, t, N, WINDOW, qk, STRIDE,
            OFFSET, D1, BN, STAGES, False, WINDOWED, S_LAYOUT, O_LAYOUT,
        )  # fmt: skip
        s, dq0, dq1 = add_tiles(
            whole, last, s, dq0, dq1, q0, q1, do, lse, delta, keys, values, k_free, v_free, start, t, N, WINDOW, qk, STRIDE,
            OFFSET, D1, BN, STAGES, True, WINDOWED, S_LAYOUT, O_LAYOUT,
        )  # fmt: skip
        dp = start_gradients(do, values, last, BN, STAGES, S_LAYOUT)
        p = probabilities(s, lse, start + last * BN, t, N, WINDOW, qk, STRIDE, OFFSET, BN, True, WINDOWED, S_LAYOUT)
        dp = warpgroup_mma_wait(0, deps=[dp])
        dq0, dq1 = start_dq(p, dp, delta, dq0, dq1, keys, last, D1, STAGES, O_LAYOUT)
        if D1 > 0:
            dq0, dq1 = warpgroup_mma_wait(0, deps=[dq0, dq1])
        else:
            dq0 = warpgroup_mma_wait(0, deps=[dq0])
    _queries, rows, there = rows_of(consumer, first, s0, S, H, g, h, O_LAYOUT)
    store_columns(dq0, DQ + rows * (D0 + D1), there, scale, q0.dtype, 0, D0, ADD, O_LAYOUT)
    if D1 > 0:
        _queries, rows, there = rows_of(consumer, first, s0, S, H, g, h, P_LAYOUT)
        store_columns(dq1, DQ + rows * (D0 + D1), there, scale, q0.dtype, D0, D1, ADD, P_LAYOUT)


@gluon.jit
def strided_dq_overlapped(
    Q, KD0, KD1, VD, GRAD, LSE, DELTA, DQ, SEQUENCES, S, N, H, G, BG, WINDOW, qk, scale,
    STRIDE: gl.constexpr, OFFSET: gl.constexpr, h: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr, DV: gl.constexpr,
    BN: gl.constexpr, STAGES: gl.constexpr, WINDOWED: gl.constexpr, ADD: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Write dq of ROWS * CONSUMERS // h queries of a group; if ADD, add it to what DQ holds. Grid (tiles * BG,)."""
    BQ: gl.constexpr = ROWS * CONSUMERS // h
    dtype: gl.constexpr = KD0.dtype
    b, g = gl.program_id(0) % BG // G, gl.program_id(0) % BG % G
    first = (gl.cdiv(S, BQ) - 1 - gl.program_id(0) // BG) * BQ
    s0, S, key0, N = place_of(SEQUENCES, b, S, N, WINDOWED, PACKED)
    start, tiles, inside, whole = tiles_of(first, BQ, S, N, WINDOW, STRIDE, OFFSET, BN, WINDOWED)
    q0, q1 = two_parts(dtype, D0, D1)
    do = shared_rows(dtype, DV)
    keys, values, k_free, v_free = empty_ring(KD0, KD1, VD, D0, D1, DV, BN, STAGES)
    gl.warp_specialize(
        [
            (consume, (
                0, Q, GRAD, LSE, DELTA, DQ, q0, q1, do, keys, values, k_free, v_free, start, tiles, inside, whole, first, s0, S, N,
                H, g, WINDOW, qk, scale, STRIDE, OFFSET, h, D0, D1, DV, BN, STAGES, WINDOWED, ADD,
            )),
            (consume, (
                1, Q, GRAD, LSE, DELTA, DQ, q0, q1, do, keys, values, k_free, v_free, start, tiles, inside, whole, first, s0, S, N,
                H, g, WINDOW, qk, scale, STRIDE, OFFSET, h, D0, D1, DV, BN, STAGES, WINDOWED, ADD,
            )),
            (load_tiles, (KD0, KD1, VD, keys, values, k_free, v_free, key0 + start, g, tiles, D0, D1, DV, BN, STAGES)),
        ],
        [4, 1],
        [232, 24],
    )  # fmt: skip
