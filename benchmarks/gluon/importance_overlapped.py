"""Importance of selection blocks for Hopper, in Gluon: products run during the exponentials of another tile.

It computes what `importance.block_importance` does (Eq. 8 to 10). A program has COLUMNS (query, head) pairs; one warp loads tiles
of compressed keys into a ring of STAGES by TMA, two consumers of four warps take every second tile. A consumer starts s^T = k q^T
of its next tile, computes this one's probabilities, sums them over the heads of a query by a product with zeros and ones, and
over compressed blocks by one with the strides that both kinds of block share.

Flat layouts (`rows`), bfloat16 or float16, a head dim that nothing pads; keys are TMA descriptors (`launch`).
"""

from strided_overlapped import CONSUMERS, FIELDS, LOG2E, ROWS, barriers, load_columns, load_tile, rows_at, visible_keys
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

KEYS = gl.constexpr(64)  # of a tile
COLUMNS = gl.constexpr(CONSUMERS.value * ROWS.value)  # of a program
SHIFT = gl.constexpr(8.0)  # probabilities are scaled by 2^SHIFT, as in `importance`


@gluon.jit
def find_place(SEQUENCES, b, S, N, LO, HI, PACKED: gl.constexpr):
    """Return first token of sequence b, its first key and its keys, and first and end of its queries at work."""
    s0, key0 = b * S, b * N
    if PACKED:
        s0 = gl.load(SEQUENCES + b * FIELDS)
        key0, N = gl.load(SEQUENCES + b * FIELDS + 2), gl.load(SEQUENCES + b * FIELDS + 3)
        LO, HI = gl.load(SEQUENCES + b * FIELDS + 4), gl.load(SEQUENCES + b * FIELDS + 5)
    return s0, key0, N, LO, HI


@gluon.jit
def load_keys(KD0, KD1, keys, free, row, g, tiles, step, D0: gl.constexpr, D1: gl.constexpr, STAGES: gl.constexpr):
    """Load keys of group g from ``row`` on, ``step`` rows further for each tile, as the ring becomes free."""
    k0, k1, there = keys
    for i in range(tiles):
        at, n = i % STAGES, row + i * step
        mbarrier.wait(free.index(at), i // STAGES % 2 ^ 1)
        mbarrier.expect(there.index(at), KEYS * (D0 + D1) * 2)
        load_tile(KD0, [n, g * (D0 + D1)], there.index(at), k0.index(at))
        if D1 > 0:
            load_tile(KD1, [n, g * (D0 + D1) + D0], there.index(at), k1.index(at))


@gluon.jit
def start_scores(q0, q1, keys, i, D1: gl.constexpr, STAGES: gl.constexpr, S_LAYOUT: gl.constexpr):
    """Start k q^T with tile i [KEYS, COLUMNS], once its keys are there."""
    k0, k1, there = keys
    at = i % STAGES
    mbarrier.wait(there.index(at), i // STAGES % 2)
    s = gl.zeros([KEYS, COLUMNS], gl.float32, S_LAYOUT)
    s = warpgroup_mma(k0.index(at), q0.permute((1, 0)), s, use_acc=False, is_async=True)
    if D1 > 0:
        s = warpgroup_mma(k1.index(at), q1.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def start_sum(
    s, lse, n0, t, N, qk, heads, STRIDE: gl.constexpr, OFFSET: gl.constexpr, NQ: gl.constexpr, MASKED: gl.constexpr,
    S_LAYOUT: gl.constexpr, F_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Start the sum over heads [KEYS, NQ] of a tile's probabilities."""
    p = gl.exp2(s * qk - lse[None, :])
    if MASKED:
        n = (n0 + gl.arange(0, KEYS, gl.SliceLayout(1, S_LAYOUT)))[:, None]
        p = gl.where((n * STRIDE + OFFSET <= t[None, :]) & (n >= 0) & (n < N), p, 0.0)
    operand = gl.convert_layout(p.to(gl.float16), gl.DotOperandLayout(0, F_LAYOUT, 2))
    return warpgroup_mma(
        operand, heads.permute((1, 0)), gl.zeros([KEYS, NQ], gl.float32, F_LAYOUT), use_acc=False, is_async=True
    )


@gluon.jit
def store_blocks(summed, between, weights, at, is_stored, NQ: gl.constexpr, F_LAYOUT: gl.constexpr):
    """Sum a tile over compressed blocks and store the importance of its selection blocks."""
    between.store(summed.to(gl.float16).permute((1, 0)))
    fence_async_shared()
    zero = gl.zeros([KEYS, NQ], gl.float32, F_LAYOUT)
    found = warpgroup_mma(weights, between.permute((1, 0)), zero, use_acc=False, is_async=True)
    found = warpgroup_mma_wait(0, deps=[found])
    gl.store(at, found * (1.0 / 256), mask=is_stored)


@gluon.jit
def add_tiles(
    lo, hi, consumer, s, lse, t, N, qk, q0, q1, keys, free, heads, weights, between, OUT, is_query, n_blocks,
    STRIDE: gl.constexpr, OFFSET: gl.constexpr, A: gl.constexpr, R: gl.constexpr, D1: gl.constexpr, STEP: gl.constexpr,
    STAGES: gl.constexpr, NQ: gl.constexpr, MASKED: gl.constexpr, S_LAYOUT: gl.constexpr, F_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Write a consumer's tiles lo ... hi - 1, of which ``s`` has the first one's scores; return those of tile hi."""
    j = gl.arange(0, KEYS, gl.SliceLayout(1, F_LAYOUT))[:, None]
    for m in range(lo, hi):
        i = m * CONSUMERS + consumer
        following = start_scores(q0, q1, keys, i + CONSUMERS, D1, STAGES, S_LAYOUT)
        summed = start_sum(
            s, lse, i * STEP * R - (A - 1), t, N, qk, heads, STRIDE, OFFSET, NQ, MASKED, S_LAYOUT, F_LAYOUT
        )  # fmt: skip
        s, summed = warpgroup_mma_wait(0, deps=[following, summed])
        mbarrier.arrive(free.index((i + CONSUMERS) % STAGES), count=1)
        is_stored = (j < STEP) & (i * STEP + j < n_blocks) & is_query
        store_blocks(summed, between, weights, OUT + (i * STEP + j), is_stored, NQ, F_LAYOUT)
    return s


@gluon.jit
def consume(
    consumer, LSE, OUT, q0, q1, keys, free, heads, weights, betweens, tiles, clear, first, s0, N, hi, H, G, g, FIRST, n_blocks,
    qk, STRIDE: gl.constexpr, OFFSET: gl.constexpr, A: gl.constexpr, R: gl.constexpr, h: gl.constexpr, D1: gl.constexpr,
    STEP: gl.constexpr, STAGES: gl.constexpr, NQ: gl.constexpr,
):  # fmt: skip
    """Write every second tile of blocks, from ``consumer`` on: the first and those from ``clear`` on with masks."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16]
    )
    F_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, NQ, 16])
    mine = (tiles - consumer + 1) // CONSUMERS
    if mine > 0:
        between = betweens.index(consumer)
        c = gl.arange(0, COLUMNS, gl.SliceLayout(0, S_LAYOUT))
        t, rows, there = rows_at(c, first, s0, hi, H, g, h)
        lse = gl.load(LSE + rows, mask=there, other=float("inf")) * LOG2E
        lse = gl.where(lse == float("-inf"), float("inf"), lse) - SHIFT
        query = gl.arange(0, NQ, gl.SliceLayout(0, F_LAYOUT))
        at = OUT + (((s0 + first - FIRST + query).to(gl.int64) * G + g) * n_blocks)[None, :]
        is_query = ((query < COLUMNS // h) & (first + query < hi))[None, :]
        one = gl.minimum(1 - consumer, mine - 1)  # tile 0 begins before key 0
        whole = gl.minimum(gl.maximum((clear - consumer + 1) // CONSUMERS, one), mine - 1)
        s = warpgroup_mma_wait(0, deps=[start_scores(q0, q1, keys, consumer, D1, STAGES, S_LAYOUT)])
        mbarrier.arrive(free.index(consumer % STAGES), count=1)
        s = add_tiles(
            0, one, consumer, s, lse, t, N, qk, q0, q1, keys, free, heads, weights, between, at, is_query, n_blocks, STRIDE, OFFSET,
            A, R, D1, STEP, STAGES, NQ, True, S_LAYOUT, F_LAYOUT,
        )  # fmt: skip
        s = add_tiles(
            one, whole, consumer, s, lse, t, N, qk, q0, q1, keys, free, heads, weights, between, at, is_query, n_blocks, STRIDE,
            OFFSET, A, R, D1, STEP, STAGES, NQ, False, S_LAYOUT, F_LAYOUT,
        )  # fmt: skip
        s = add_tiles(
            whole, mine - 1, consumer, s, lse, t, N, qk, q0, q1, keys, free, heads, weights, between, at, is_query, n_blocks,
            STRIDE, OFFSET, A, R, D1, STEP, STAGES, NQ, True, S_LAYOUT, F_LAYOUT,
        )  # fmt: skip
        last = (mine - 1) * CONSUMERS + consumer
        summed = start_sum(
            s, lse, last * STEP * R - (A - 1), t, N, qk, heads, STRIDE, OFFSET, NQ, True, S_LAYOUT, F_LAYOUT
        )
        summed = warpgroup_mma_wait(0, deps=[summed])
        j = last * STEP + gl.arange(0, KEYS, gl.SliceLayout(1, F_LAYOUT))[:, None]
        is_stored = (j < last * STEP + STEP) & (j < n_blocks) & is_query
        store_blocks(summed, between, weights, at + j, is_stored, NQ, F_LAYOUT)


@gluon.jit
def importance_overlapped(
    Q, KD0, KD1, LSE, OUT, SEQUENCES, S, N, H, G, BG, LO, HI, FIRST, n_blocks, qk,
    STRIDE: gl.constexpr, OFFSET: gl.constexpr, A: gl.constexpr, R: gl.constexpr, h: gl.constexpr, D0: gl.constexpr,
    D1: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, NQ: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Write the importance of blocks up to their own for COLUMNS // h queries of a group, the last first. Grid (tiles * BG,).

    A compressed block has A strides, a selection block R; a tile of KEYS keys covers the STEP * R + A - 1 strides of STEP blocks.
    """
    gl.static_assert(STAGES % CONSUMERS == 0)  # a stage has one consumer, which knows its phases by their parity alone
    BQ: gl.constexpr = COLUMNS // h
    dtype: gl.constexpr = KD0.dtype
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    b, g = gl.program_id(0) % BG // G, gl.program_id(0) % BG % G
    s0, key0, N, lo, hi = find_place(SEQUENCES, b, S, N, LO, HI, PACKED)
    first = lo + (gl.cdiv(HI - LO, BQ) - 1 - gl.program_id(0) // BG) * BQ
    last = gl.minimum(first + BQ, hi) - 1
    n_seen = gl.where(first < hi, gl.minimum(n_blocks, last // (R * STRIDE) + 1), 0)
    tiles = gl.cdiv(n_seen, STEP)
    # Every query sees the keys of tiles 1 ... clear - 1 whole.
    whole = visible_keys(first, N, STRIDE, OFFSET) - KEYS + (A - 1)
    clear = gl.where(whole >= STEP * R, whole // (STEP * R), 0) + 1

    q0 = gl.allocate_shared_memory(dtype, [COLUMNS, D0], gl.NVMMASharedLayout.get_default_for([COLUMNS, D0], dtype))
    q1 = q0
    k0 = gl.allocate_shared_memory(dtype, [STAGES, KEYS, D0], KD0.layout)
    k1 = k0
    c = gl.arange(0, COLUMNS, gl.SliceLayout(1, LINES))
    _queries, rows, there = rows_at(c, first, s0, hi, H, g, h)
    load_columns(q0, Q + rows * (D0 + D1), there, 0, D0, LINES)
    if D1 > 0:
        q1 = gl.allocate_shared_memory(dtype, [COLUMNS, D1], gl.NVMMASharedLayout.get_default_for([COLUMNS, D1], dtype))
        k1 = gl.allocate_shared_memory(dtype, [STAGES, KEYS, D1], KD1.layout)
        load_columns(q1, Q + rows * (D0 + D1), there, D0, D1, LINES)
    heads = gl.allocate_shared_memory(
        gl.float16, [NQ, COLUMNS], gl.NVMMASharedLayout.get_default_for([NQ, COLUMNS], gl.float16)
    )
    c = gl.arange(0, COLUMNS, gl.SliceLayout(0, LINES))
    is_of = (c // h)[None, :] == gl.arange(0, NQ, gl.SliceLayout(1, LINES))[:, None]
    heads.store((is_of & ((c < BQ * h) & (first + c // h < hi))[None, :]).to(gl.float16))
    weights = gl.allocate_shared_memory(
        gl.float16, [KEYS, KEYS], gl.NVMMASharedLayout.get_default_for([KEYS, KEYS], gl.float16)
    )
    j = gl.arange(0, KEYS, gl.SliceLayout(1, LINES))[:, None] * R
    n = gl.arange(0, KEYS, gl.SliceLayout(0, LINES))[None, :] - (A - 1)
    weights.store(gl.maximum(gl.minimum(n + A, j + R) - gl.maximum(n, j), 0).to(gl.float16))
    betweens = gl.allocate_shared_memory(
        gl.float16, [CONSUMERS, NQ, KEYS], gl.NVMMASharedLayout.get_default_for([NQ, KEYS], gl.float16)
    )
    there, free = barriers(STAGES, 1)
    fence_async_shared()
    keys = (k0, k1, there)
    gl.warp_specialize(
        [
            (consume, (
                0, LSE, OUT, q0, q1, keys, free, heads, weights, betweens, tiles, clear, first, s0, N, hi, H, G, g, FIRST, n_blocks,
                qk, STRIDE, OFFSET, A, R, h, D1, STEP, STAGES, NQ,
            )),
            (consume, (
                1, LSE, OUT, q0, q1, keys, free, heads, weights, betweens, tiles, clear, first, s0, N, hi, H, G, g, FIRST, n_blocks,
                qk, STRIDE, OFFSET, A, R, h, D1, STEP, STAGES, NQ,
            )),
            (load_keys, (KD0, KD1, keys, free, key0 - (A - 1), g, tiles, STEP * R, D0, D1, STAGES)),
        ],
        [4, 1],
        [232, 24],
    )  # fmt: skip
