"""Forward of the selected branch for Hopper, in Gluon: the rows of an item's queries arrive by TMA, ahead of their products.

It computes what `selection_forward.selected_forward` does, which finds each row by address arithmetic and waits for it. The heads
of a query and group are h consecutive rows, so a query is one copy per WIDTH columns. A program has an item and a sub-block of
KEYS keys; one warp copies rows into a ring of STAGES, two consumers of four warps take every second tile of ROWS rows.

Flat layouts (`rows`), bfloat16 or float16, head dims that are multiples of WIDTH, groups of 8 to 64 heads, a power of two.
"""

from strided_overlapped import CONSUMERS, FIELDS, ROWS, barriers, load_tile
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

KEYS = gl.constexpr(64)  # of a sub-block
# Columns of a copy: 128 bytes, so that queries lie one behind the other as a product reads them.
WIDTH = gl.constexpr(64)


@gluon.jit
def load_rows(
    QD, LISTS, q, there, free, row, begin, count, tiles, H, n_sel: gl.constexpr, h: gl.constexpr, DK: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Load the rows of the ``count`` queries of a list, as the ring becomes free."""
    PARTS: gl.constexpr = DK // WIDTH
    for i in range(tiles):
        at = i % STAGES
        firsts = ()
        for query in gl.static_range(ROWS // h):
            # Behind the last query, it once more: nothing of it is stored.
            number = gl.minimum(i * (ROWS // h) + query, count - 1)
            first = row + gl.load(LISTS + begin + number) // n_sel * H
            firsts = firsts + (first,)  # type: ignore[assignment]  # noqa: RUF005  Triton unpacks nothing
        mbarrier.wait(free.index(at), i // STAGES % 2 ^ 1)
        mbarrier.expect(there.index(at), ROWS * DK * 2)
        for query in gl.static_range(ROWS // h):
            for part in gl.static_range(PARTS):
                target = q.index(at * PARTS + part).slice(query * h, h)
                load_tile(QD, [firsts[query], part * WIDTH], there.index(at), target)


@gluon.jit
def consume(
    consumer, LISTS, PART, PART_LSE, q, k, v, there, free, begin, count, tiles, n0, stop, before, G, g, sub, qk,
    n_sel: gl.constexpr, SUB: gl.constexpr, h: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Attend with every second tile of rows, from ``consumer`` on, and store its parts."""
    PARTS: gl.constexpr = DK // WIDTH
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DV, 16])
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    for i in range(consumer, tiles, CONSUMERS):
        at = i % STAGES
        r = i * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
        line = i * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LINES))
        there_r, there_line = r < count * h, line < count * h
        entry = gl.load(LISTS + begin + r // h, mask=there_r, other=0)
        place = (
            find_place(gl.load(LISTS + begin + line // h, mask=there_line, other=0), before, G, g, sub, n_sel, SUB) * h
            + line % h
        )
        mbarrier.wait(there.index(at), i // STAGES % 2)
        s = gl.zeros([ROWS, KEYS], gl.float32, S_LAYOUT)
        for part in gl.static_range(PARTS):
            rows = q.index(at * PARTS + part)
            s = warpgroup_mma(rows, k.index(part).permute((1, 0)), s, use_acc=part > 0, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(free.index(at), count=1)
        n = (n0 + gl.arange(0, KEYS, gl.SliceLayout(0, S_LAYOUT)))[None, :]
        s = gl.where((n <= (entry // n_sel)[:, None]) & (n < stop), s, float("-inf"))
        top = gl.max(s, 1) * qk
        finite = gl.where(top == float("-inf"), 0.0, top)
        p = gl.exp2(s * qk - finite[:, None])
        total = gl.sum(p, 1)
        some = gl.where(total > 0, total, 1.0)
        operand = gl.convert_layout(p.to(v.dtype), gl.DotOperandLayout(0, O_LAYOUT, 2))
        o = gl.zeros([ROWS, DV], gl.float32, O_LAYOUT)
        o = warpgroup_mma_wait(0, deps=[warpgroup_mma(operand, v, o, use_acc=False, is_async=True)])
        o = o * gl.convert_layout(1.0 / some, gl.SliceLayout(1, O_LAYOUT))[:, None]
        column = gl.arange(0, DV, gl.SliceLayout(0, LINES))[None, :]
        gl.store(
            PART + (place * DV)[:, None] + column, gl.convert_layout(o.to(v.dtype), LINES), mask=there_line[:, None]
        )
        place = find_place(entry, before, G, g, sub, n_sel, SUB) * h + r % h
        gl.store(PART_LSE + place, gl.where(total > 0, finite + gl.log2(some), float("-inf")), mask=there_r)


@gluon.jit
def find_place(entry, before, G, g, sub, n_sel: gl.constexpr, SUB: gl.constexpr):
    """Return the number, among the parts [queries, G, n_sel * SUB], of a list's entry and a sub-block (`rows.part_of`)."""
    return ((before + entry // n_sel).to(gl.int64) * G + g) * (n_sel * SUB) + entry % n_sel * SUB + sub


@gluon.jit
def selected_forward_tma(
    QD, K, V, LISTS, ITEMS, PART, PART_LSE, SEQUENCES, S, H, G, FIRST, qk,
    n_sel: gl.constexpr, L_SEL: gl.constexpr, SUB: gl.constexpr, h: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr,
    STAGES: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Attend with an item's queries to a sub-block. Grid (items, SUB)."""
    gl.static_assert(STAGES % CONSUMERS == 0)  # a stage has one consumer, which knows its phases by their parity alone
    PARTS: gl.constexpr = DK // WIDTH
    dtype: gl.constexpr = QD.dtype
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    item = ITEMS + gl.program_id(0).to(gl.int64) * 4
    group = gl.load(item)
    if group < 0:
        return
    j, begin, count = gl.load(item + 1), gl.load(item + 2), gl.load(item + 3) - gl.load(item + 2)
    b, g, sub = group // G, group % G, gl.program_id(1)
    s0 = b * S
    if PACKED:
        s0, S = gl.load(SEQUENCES + b * FIELDS), gl.load(SEQUENCES + b * FIELDS + 1)
    n0, stop = j * L_SEL + sub * KEYS, gl.minimum((j + 1) * L_SEL, S)
    tiles = gl.cdiv(count * h, ROWS)
    shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], dtype)
    q = gl.allocate_shared_memory(dtype, [STAGES * PARTS, ROWS, WIDTH], shared)
    k = gl.allocate_shared_memory(dtype, [PARTS, KEYS, WIDTH], shared)
    v = gl.allocate_shared_memory(dtype, [KEYS, DV], gl.NVMMASharedLayout.get_default_for([KEYS, DV], dtype))
    # Not by TMA: what lies behind the block may be another sequence's, and times a probability of 0 a NaN is one.
    n = n0 + gl.arange(0, KEYS, gl.SliceLayout(1, LINES))
    inside, at = (n < stop)[:, None], (s0 + n).to(gl.int64) * G + g
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, LINES))[None, :]
    for part in gl.static_range(PARTS):
        k.index(part).store(gl.load(K + (at * DK)[:, None] + (part * WIDTH + columns), mask=inside, other=0.0))
    columns = gl.arange(0, DV, gl.SliceLayout(0, LINES))[None, :]
    v.store(gl.load(V + (at * DV)[:, None] + columns, mask=inside, other=0.0))
    there, free = barriers(STAGES, 1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (consume, (
                0, LISTS, PART, PART_LSE, q, k, v, there, free, begin, count, tiles, n0, stop, s0 - FIRST, G, g, sub,
                qk, n_sel, SUB, h, DK, DV, STAGES,
            )),
            (consume, (
                1, LISTS, PART, PART_LSE, q, k, v, there, free, begin, count, tiles, n0, stop, s0 - FIRST, G, g, sub,
                qk, n_sel, SUB, h, DK, DV, STAGES,
            )),
            (load_rows, (QD, LISTS, q, there, free, s0 * H + g * h, begin, count, tiles, H, n_sel, h, DK, STAGES)),
        ],
        [4, 1],
        [168, 40],
    )  # fmt: skip
