"""Forward of the window and the compressed branch for Hopper, in Gluon: products run during another tile's softmax.

It computes what `strided.strided_forward` does; plain Triton waits for every product before a softmax. A program has 128 rows
and three groups of warps: one warp loads tiles of keys and values into a ring of STAGES by TMA, two consumers of four warps
have 64 rows each. A consumer starts the next tile's q k^T, computes the softmax of this one, adds p v, then waits for both
(pipelining within a warp group, FlashAttention-3, arXiv 2407.08608, section 3.2). Nothing orders the consumers, so one's
products run under the other's softmax, too.

Flat layouts (`rows`), bfloat16 or float16, head dims that nothing pads; keys and values are TMA descriptors (`launch`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # Triton 3.6's name
LOG2E = gl.constexpr(1.4426950408889634)
FIELDS = gl.constexpr(8)  # of a sequence in the table (`rows`)
ROWS = gl.constexpr(64)  # of a consumer
CONSUMERS = gl.constexpr(2)


@gluon.jit
def visible_keys(t, N, STRIDE: gl.constexpr, OFFSET: gl.constexpr):
    """Return how many keys, from the first, query t sees where key n ends at token n * STRIDE + OFFSET."""
    return gl.where(t >= OFFSET, gl.minimum(N, (t - OFFSET) // STRIDE + 1), 0)


@gluon.jit
def find_place(SEQUENCES, b, S, N, WINDOWED: gl.constexpr, PACKED: gl.constexpr):
    """Return first token and tokens of sequence b, its first key and its keys."""
    s0, key0 = b * S, b * N
    if PACKED:
        s0, S = gl.load(SEQUENCES + b * FIELDS), gl.load(SEQUENCES + b * FIELDS + 1)
        key0, N = gl.load(SEQUENCES + b * FIELDS + 2), gl.load(SEQUENCES + b * FIELDS + 3)
    if WINDOWED:
        key0, N = s0, S
    return s0, S, key0, N


@gluon.jit
def tiles_of(
    first, BQ: gl.constexpr, S, N, WINDOW, STRIDE: gl.constexpr, OFFSET: gl.constexpr, BN: gl.constexpr, WINDOWED: gl.constexpr
):  # fmt: skip
    """Return, for queries first ... first + BQ - 1, their first key, their tiles of keys, and which of these have no masks:
    from ``inside`` to ``whole`` - 1, never the last.
    """
    start, inside, last = 0, 0, gl.minimum(first + BQ, S) - 1
    if WINDOWED:
        start = gl.maximum(0, first - WINDOW + 1)
        inside = gl.cdiv(gl.maximum(0, last - WINDOW + 1) - start, BN)
    end = gl.where(first < S, visible_keys(last, N, STRIDE, OFFSET), 0)
    tiles = gl.cdiv(gl.maximum(end - start, 0), BN)
    inside = gl.minimum(inside, tiles - 1)
    whole = gl.minimum(gl.maximum((visible_keys(first, N, STRIDE, OFFSET) - start) // BN, inside), tiles - 1)
    return start, tiles, inside, whole


@gluon.jit
def is_seen(
    n0, t, N, WINDOW, STRIDE: gl.constexpr, OFFSET: gl.constexpr, BN: gl.constexpr, WINDOWED: gl.constexpr,
    S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Return which of keys n0 ... n0 + BN - 1 queries t see."""
    n = (n0 + gl.arange(0, BN, gl.SliceLayout(0, S_LAYOUT)))[None, :]
    seen = (n * STRIDE + OFFSET <= t[:, None]) & (n < N)
    if WINDOWED:
        seen = seen & (t[:, None] - n < WINDOW)
    return seen


@gluon.jit
def rows_at(r, first, s0, S, H, g, h: gl.constexpr):
    """Return the queries of a program's rows r, their rows [tokens, heads] and which of them are there."""
    t = first + r // h
    return t, (s0 + t).to(gl.int64) * H + g * h + r % h, (r < ROWS * CONSUMERS // h * h) & (t < S)


@gluon.jit
def rows_of(consumer, first, s0, S, H, g, h: gl.constexpr, LAYOUT: gl.constexpr):
    """Return `rows_at` of a consumer's rows."""
    return rows_at(consumer * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)), first, s0, S, H, g, h)


@gluon.jit
def load_columns(target, where, there, FIRST: gl.constexpr, WIDTH: gl.constexpr, LINES: gl.constexpr):
    """Load columns FIRST ... FIRST + WIDTH - 1 of rows into shared memory; zeros for rows that are not there."""
    column = FIRST + gl.arange(0, WIDTH, gl.SliceLayout(0, LINES))
    target.store(gl.load(where[:, None] + column[None, :], mask=there[:, None], other=0.0))


@gluon.jit
def shared_rows(dtype: gl.constexpr, D: gl.constexpr):
    """Return shared memory for the rows of each consumer."""
    return gl.allocate_shared_memory(
        dtype, [CONSUMERS, ROWS, D], gl.NVMMASharedLayout.get_default_for([ROWS, D], dtype)
    )


@gluon.jit
def two_parts(dtype: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr):
    """Return `shared_rows` of both parts; the first one twice where there is no second."""
    x0 = shared_rows(dtype, D0)
    x1 = x0
    if D1 > 0:
        x1 = shared_rows(dtype, D1)
    return x0, x1


@gluon.jit
def barriers(STAGES: gl.constexpr, readers: gl.constexpr):
    """Return the barriers at which a stage's tile is there, and at which its ``readers`` have freed it. A fence must follow."""
    there = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(there.index(i), count=1)
        mbarrier.init(free.index(i), count=readers)
    return there, free


@gluon.jit
def empty_ring(
    KD0, KD1, VD, D0: gl.constexpr, D1: gl.constexpr, DV: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr
):
    """Return a ring for STAGES tiles of keys and of values, and the barriers at which both consumers free a tile of each."""
    k0 = gl.allocate_shared_memory(KD0.dtype, [STAGES, BN, D0], KD0.layout)
    k1 = k0
    if D1 > 0:
        k1 = gl.allocate_shared_memory(KD0.dtype, [STAGES, BN, D1], KD1.layout)
    v = gl.allocate_shared_memory(VD.dtype, [STAGES, BN, DV], VD.layout)
    k_there, k_free = barriers(STAGES, CONSUMERS)
    v_there, v_free = barriers(STAGES, CONSUMERS)
    fence_async_shared()
    return (k0, k1, k_there), (v, v_there), k_free, v_free


@gluon.jit
def load_tiles(
    KD0, KD1, VD, keys, values, k_free, v_free, row, g, tiles, D0: gl.constexpr, D1: gl.constexpr, DV: gl.constexpr,
    BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load keys and values row ... row + tiles * BN - 1 of group g, tile by tile, as the ring becomes free."""
    k0, k1, k_there = keys
    v, v_there = values
    for j in range(tiles):
        at, turn, n = j % STAGES, j // STAGES % 2, row + j * BN
        mbarrier.wait(k_free.index(at), turn ^ 1)
        mbarrier.expect(k_there.index(at), BN * (D0 + D1) * 2)
        load_tile(KD0, [n, g * (D0 + D1)], k_there.index(at), k0.index(at))
        if D1 > 0:
            load_tile(KD1, [n, g * (D0 + D1) + D0], k_there.index(at), k1.index(at))
        mbarrier.wait(v_free.index(at), turn ^ 1)
        mbarrier.expect(v_there.index(at), BN * DV * 2)
        load_tile(VD, [n, g * DV], v_there.index(at), v.index(at))


@gluon.jit
def start_scores(q0, q1, keys, j, D1: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, S_LAYOUT: gl.constexpr):
    """Start q k^T with tile j [ROWS, BN], once its keys are there."""
    k0, k1, k_there = keys
    at = j % STAGES
    mbarrier.wait(k_there.index(at), j // STAGES % 2)
    s = gl.zeros([ROWS, BN], gl.float32, S_LAYOUT)
    s = warpgroup_mma(q0, k0.index(at).permute((1, 0)), s, use_acc=False, is_async=True)
    if D1 > 0:
        s = warpgroup_mma(q1, k1.index(at).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def start_output(p, acc, values, j, STAGES: gl.constexpr):
    """Start acc + p v with tile j, once its values are there."""
    v, v_there = values
    at = j % STAGES
    mbarrier.wait(v_there.index(at), j // STAGES % 2)
    return warpgroup_mma(p, v.index(at), acc, is_async=True)


@gluon.jit
def softmax(
    s, total, top, v, n0, t, N, WINDOW, qk, STRIDE: gl.constexpr, OFFSET: gl.constexpr, BN: gl.constexpr,
    MASKED: gl.constexpr, WINDOWED: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Return the probabilities of a tile of scores as an operand, the new sum and maximum of rows, and how outputs shrink."""
    if MASKED:
        s = gl.where(is_seen(n0, t, N, WINDOW, STRIDE, OFFSET, BN, WINDOWED, S_LAYOUT), s, float("-inf"))
    new_top = gl.maximum(top, gl.max(s, 1) * qk)
    if MASKED:
        finite = gl.where(new_top == float("-inf"), 0.0, new_top)
    else:
        finite = new_top
    p = gl.exp2(s * qk - finite[:, None])
    shrink = gl.exp2(top - finite)
    total = total * shrink + gl.sum(p, 1)
    operand = gl.convert_layout(p.to(v.dtype), gl.DotOperandLayout(0, O_LAYOUT, 2))
    return operand, total, new_top, gl.convert_layout(shrink, gl.SliceLayout(1, O_LAYOUT))[:, None]


@gluon.jit
def attend_to(
    lo, hi, s, acc, total, top, q0, q1, keys, values, k_free, v_free, start, t, N, WINDOW, qk, STRIDE: gl.constexpr,
    OFFSET: gl.constexpr, D1: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
    WINDOWED: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Add tiles lo ... hi - 1, of which ``s`` has the first one's scores; return those of tile hi, outputs, sums and maxima."""
    for j in range(lo, hi):
        following = start_scores(q0, q1, keys, j + 1, D1, BN, STAGES, S_LAYOUT)
        p, total, top, shrink = softmax(
            s, total, top, values[0], start + j * BN, t, N, WINDOW, qk, STRIDE, OFFSET, BN, MASKED, WINDOWED, S_LAYOUT, O_LAYOUT,
        )  # fmt: skip
        acc = start_output(p, acc * shrink, values, j, STAGES)
        # The output is waited for in the same turn: ptxas orders all products where one is under way from turn to turn.
        s, acc = warpgroup_mma_wait(0, deps=[following, acc])
        mbarrier.arrive(k_free.index((j + 1) % STAGES), count=1)
        mbarrier.arrive(v_free.index(j % STAGES), count=1)
    return s, acc, total, top


@gluon.jit
def consume(
    consumer, Q, O, LSE, q0s, q1s, keys, values, k_free, v_free, start, tiles, inside, whole, first, s0, S, N, H, g, WINDOW, qk,
    STRIDE: gl.constexpr, OFFSET: gl.constexpr, h: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr, DV: gl.constexpr,
    BN: gl.constexpr, STAGES: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """Attend with a consumer's rows to all tiles: masked before ``inside`` and from ``whole`` on."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DV, 16])
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    q0, q1 = q0s.index(consumer), q1s.index(consumer)
    _queries, rows, there = rows_of(consumer, first, s0, S, H, g, h, LINES)
    load_columns(q0, Q + rows * (D0 + D1), there, 0, D0, LINES)
    if D1 > 0:
        load_columns(q1, Q + rows * (D0 + D1), there, D0, D1, LINES)
    fence_async_shared()
    t, at, is_there = rows_of(consumer, first, s0, S, H, g, h, S_LAYOUT)
    acc = gl.zeros([ROWS, DV], gl.float32, O_LAYOUT)
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S_LAYOUT))
    top = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    if tiles > 0:
        last = tiles - 1
        s = warpgroup_mma_wait(0, deps=[start_scores(q0, q1, keys, 0, D1, BN, STAGES, S_LAYOUT)])
        mbarrier.arrive(k_free.index(0), count=1)
        if WINDOWED:
            s, acc, total, top = attend_to(
                0, inside, s, acc, total, top, q0, q1, keys, values, k_free, v_free, start, t, N, WINDOW, qk, STRIDE,
                OFFSET, D1, BN, STAGES, True,
                WINDOWED, S_LAYOUT, O_LAYOUT,
            )  # fmt: skip
        s, acc, total, top = attend_to(
            inside, whole, s, acc, total, top, q0, q1, keys, values, k_free, v_free, start, t, N, WINDOW, qk, STRIDE,
                OFFSET, D1, BN, STAGES, False,
            WINDOWED, S_LAYOUT, O_LAYOUT,
        )  # fmt: skip
        s, acc, total, top = attend_to(
            whole, last, s, acc, total, top, q0, q1, keys, values, k_free, v_free, start, t, N, WINDOW, qk, STRIDE,
                OFFSET, D1, BN, STAGES, True,
            WINDOWED, S_LAYOUT, O_LAYOUT,
        )  # fmt: skip
        p, total, top, shrink = softmax(
            s, total, top, values[0], start + last * BN, t, N, WINDOW, qk, STRIDE, OFFSET, BN, True, WINDOWED, S_LAYOUT, O_LAYOUT,
        )  # fmt: skip
        acc = warpgroup_mma_wait(0, deps=[start_output(p, acc * shrink, values, last, STAGES)])
    some = total > 0
    share = gl.convert_layout(1.0 / gl.where(some, total, 1.0), gl.SliceLayout(1, O_LAYOUT))
    lse = gl.where(some, (top + gl.log2(gl.where(some, total, 1.0))) / LOG2E, float("-inf"))
    gl.store(LSE + at, lse, mask=is_there)
    _queries, rows, there = rows_of(consumer, first, s0, S, H, g, h, O_LAYOUT)
    where = O + (rows * DV)[:, None] + gl.arange(0, DV, gl.SliceLayout(0, O_LAYOUT))[None, :]
    gl.store(where, (acc * share[:, None]).to(q0.dtype), mask=there[:, None])


@gluon.jit
def strided_overlapped(
    Q, KD0, KD1, VD, O, LSE, SEQUENCES, S, N, H, G, BG, WINDOW, qk,
    STRIDE: gl.constexpr, OFFSET: gl.constexpr, h: gl.constexpr, D0: gl.constexpr, D1: gl.constexpr, DV: gl.constexpr,
    BN: gl.constexpr, STAGES: gl.constexpr, WINDOWED: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Attend with ROWS * CONSUMERS // h queries of a group, the last ones first, as they see most. Grid (tiles * BG,)."""
    BQ: gl.constexpr = ROWS * CONSUMERS // h
    dtype: gl.constexpr = KD0.dtype
    b, g = gl.program_id(0) % BG // G, gl.program_id(0) % BG % G
    first = (gl.cdiv(S, BQ) - 1 - gl.program_id(0) // BG) * BQ
    s0, S, key0, N = find_place(SEQUENCES, b, S, N, WINDOWED, PACKED)
    start, tiles, inside, whole = tiles_of(first, BQ, S, N, WINDOW, STRIDE, OFFSET, BN, WINDOWED)
    q0, q1 = two_parts(dtype, D0, D1)
    keys, values, k_free, v_free = empty_ring(KD0, KD1, VD, D0, D1, DV, BN, STAGES)
    gl.warp_specialize(
        [
            (consume, (
                0, Q, O, LSE, q0, q1, keys, values, k_free, v_free, start, tiles, inside, whole, first, s0, S, N, H, g, WINDOW, qk,
                STRIDE, OFFSET, h, D0, D1, DV, BN, STAGES, WINDOWED,
            )),
            (consume, (
                1, Q, O, LSE, q0, q1, keys, values, k_free, v_free, start, tiles, inside, whole, first, s0, S, N, H, g, WINDOW, qk,
                STRIDE, OFFSET, h, D0, D1, DV, BN, STAGES, WINDOWED,
            )),
            (load_tiles, (KD0, KD1, VD, keys, values, k_free, v_free, key0 + start, g, tiles, D0, D1, DV, BN, STAGES)),
        ],
        [4, 1],
        [232, 24],
    )  # fmt: skip
