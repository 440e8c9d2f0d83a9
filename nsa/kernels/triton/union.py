"""Forward of the selected branch by unions: U neighbouring queries read each block that any of them picked once.

Where neighbours pick nearly the same blocks, a tile of U queries has few distinct ones, and this costs little more products
than those picked, reads keys and values a fraction as often, and leaves no parts in memory. Where they do not, it multiplies
up to U times too much; so `unite` counts, `choose` decides for each sequence and group, on the device, and the programs of
the form that was not chosen (here or in `selection_forward`) end at once.

A tile's blocks are sorted; a bit per query marks the queries that picked it. An online softmax over them (arXiv 2307.08691), in
which the rows (query, head of the group: `rows`) without the bit stay as they were: exact, as by block.

Flat layouts (`rows`). BLOCKS, BITS int32 [queries * G * n] for the queries from token FIRST on: a tile has the room of its
queries' picks, group after group.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa.kernels.triton.rows import add_product, load_two, product, queries_of, store_attention, tokens_of, zeros_two
from nsa.kernels.triton.selection_forward import gate_and_store

NO_BLOCK = tl.constexpr(1 << 30)


@triton.jit
def unite(
    PICKS, BLOCKS, BITS, EXCESS, SEQUENCES, S, G, LO, HI, FIRST, tiles, most_work,
    n_sel: tl.constexpr, U: tl.constexpr, NS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Write the distinct blocks of a tile, ascending, `NO_BLOCK` behind the last, and the queries that picked each.

    EXCESS [queries * G], at a tile's first query: products that the union makes, less ``most_work`` times those of the picks
    alone, in (query, block) pairs. Grid (tiles * sequences * G,).
    """
    group = tl.program_id(0) // tiles
    b, g = group // G, group % G
    s0, _ = tokens_of(SEQUENCES, b, S, PACKED)
    lo, hi = queries_of(SEQUENCES, b, LO, HI, PACKED)
    first = lo + tl.program_id(0) % tiles * U
    if first < hi:
        e = tl.arange(0, U * NS)
        u, slot = e // NS, e % NS
        at = ((s0 + first + u).to(tl.int64) * G + g) * n_sel + slot
        picked = tl.load(PICKS + at, mask=(first + u < hi) & (slot < n_sel), other=-1)
        key = tl.sort(tl.where(picked < 0, NO_BLOCK, picked * U + u))  # a query picks a block once: no two are alike
        is_pick = key < NO_BLOCK
        block = tl.where(is_pick, key // U, NO_BLOCK)
        before, behind = tl.gather(block, tl.maximum(e - 1, 0), 0), tl.gather(block, tl.minimum(e + 1, U * NS - 1), 0)
        is_first = is_pick & ((e == 0) | (before != block))
        is_last = is_pick & ((e == U * NS - 1) | (behind != block))
        place = tl.cumsum(is_first.to(tl.int32), 0) - 1
        count = tl.sum(is_first.to(tl.int32), 0)
        room = tl.minimum(U, hi - first) * n_sel
        base = (s0 + first - FIRST) * G * n_sel + g * room
        tl.store(BLOCKS + base + place, block, mask=is_first)
        tl.store(BLOCKS + base + e, tl.full([U * NS], NO_BLOCK, tl.int32), mask=(e >= count) & (e < room))
        # Sums of bits up to the last query of each block: their differences are the queries that picked it.
        bits = tl.cumsum(tl.where(is_pick, 1 << (key % U), 0), 0)
        tl.store(BITS + base + place, bits, mask=is_last)
        work = count * U - most_work * tl.sum(is_pick.to(tl.int32), 0)
        tl.store(EXCESS + (s0 + first - FIRST) * G + g, work)


@triton.jit
def choose(
    EXCESS, CHOICE, SEQUENCES, S, G, LO, HI, FIRST, U: tl.constexpr, BT: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Choose: CHOICE [sequences * G] is 1 where unions make no more products than allowed, else 0. Grid (sequences * G,)."""
    b, g = tl.program_id(0) // G, tl.program_id(0) % G
    s0, _ = tokens_of(SEQUENCES, b, S, PACKED)
    lo, hi = queries_of(SEQUENCES, b, LO, HI, PACKED)
    total = tl.zeros([BT], tl.int64)
    for first in range(lo, hi, U * BT):
        t = first + tl.arange(0, BT) * U
        total += tl.load(EXCESS + (s0 + t - FIRST) * G + g, mask=t < hi, other=0)
    tl.store(CHOICE + tl.program_id(0), (tl.sum(total, 0) <= 0).to(tl.int32))


@triton.jit
def _attend_to(
    i, q0, q1, acc0, acc1, total, top, BLOCKS, BITS, K, V, KD0, KD1, VD0, VD1, row, G, g, u, t, length, qk,
    L_SEL: tl.constexpr, SUB: tl.constexpr, DK: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr,
    E0: tl.constexpr, E1: tl.constexpr, BN: tl.constexpr, IS_OWN: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend to sub-block i of a tile's; if IS_OWN, one that not every query of the tile sees whole."""
    c = i // SUB
    j = tl.load(BLOCKS + c)
    bits = tl.load(BITS + c) - tl.load(BITS + c - 1, mask=c > 0, other=0)
    inner = i % SUB * BN + tl.arange(0, BN)
    n = j * L_SEL + inner
    if TMA and not IS_OWN:
        at = row + j * L_SEL + i % SUB * BN
        k0, v0 = KD0.load([at, g * DK]), VD0.load([at, g * DV])
        k1, v1 = k0, v0
        if D1 > 0:
            k1 = KD1.load([at, g * DK + D0])
        if E1 > 0:
            v1 = VD1.load([at, g * DV + E0])
    else:
        inside = (inner < L_SEL) & (n < length)
        MASKED: tl.constexpr = IS_OWN or SUB * BN > L_SEL
        at = (row + n).to(tl.int64) * G + g
        k0, k1 = load_two(K, at * DK, inside, DK, D0, D1, MASKED)
        v0, v1 = load_two(V, at * DV, inside, DV, E0, E1, MASKED)
    s = product(q0, q1, k0, k1, D1, PRECISION)
    if IS_OWN:
        s = tl.where((inner < L_SEL)[None, :] & (n[None, :] <= t[:, None]), s, float("-inf"))
    elif SUB * BN > L_SEL:
        s = tl.where((inner < L_SEL)[None, :], s, float("-inf"))
    is_picked = ((bits >> u) & 1) > 0
    new_top = tl.where(is_picked, tl.maximum(top, tl.max(s, 1) * qk), top)
    finite = tl.where(new_top == float("-inf"), 0.0, new_top)
    # exp2(s - inf) is 0: a row that did not pick the block needs no mask of its scores.
    p = tl.exp2(s * qk - tl.where(is_picked, finite, float("inf"))[:, None])
    shrink = tl.exp2(top - finite)
    total = total * shrink + tl.sum(p, 1)
    acc0 = acc0 * shrink[:, None]
    if E1 > 0:
        acc1 = acc1 * shrink[:, None]
    acc0, acc1 = add_product(p.to(v0.dtype), v0, v1, acc0, acc1, E1, PRECISION)
    return acc0, acc1, total, new_top


@triton.jit
def union_forward(
    Q, K, V, KD0, KD1, VD0, VD1, BLOCKS, BITS, CHOICE, O, LSE, O_CMP, O_WIN, GATES, OUT, SEQUENCES, S, H, G, LO, HI, FIRST, tiles,
    qk, n_sel: tl.constexpr, L_SEL: tl.constexpr, SUB: tl.constexpr, h: tl.constexpr, DK: tl.constexpr, D0: tl.constexpr,
    D1: tl.constexpr, DV: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    U: tl.constexpr, NS: tl.constexpr, GATED: tl.constexpr, TMA: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend with a tile of U queries of a group: write O and LSE; if GATED, OUT = g0 O_CMP + g1 O + g2 O_WIN (Eq. 5).

    Tiles of a group are neighbours in the grid, as its keys and values may fit the L2 cache where all groups' do not. Grid
    (tiles * sequences * G,).
    """
    group = tl.program_id(0) // tiles
    b, g = group // G, group % G
    s0, length = tokens_of(SEQUENCES, b, S, PACKED)
    lo, hi = queries_of(SEQUENCES, b, LO, HI, PACKED)
    first = lo + tl.program_id(0) % tiles * U
    if (first < hi) & (tl.load(CHOICE + group) > 0):
        r = tl.arange(0, BM)
        u = r // h
        t = first + u
        there = (u < U) & (t < hi)
        rows = (s0 + t).to(tl.int64) * H + g * h + r % h
        q0, q1 = load_two(Q, rows * DK, there, DK, D0, D1, True)
        acc0, acc1 = zeros_two(BM, E0, E1)
        total = tl.zeros([BM], tl.float32)
        top = tl.full([BM], float("-inf"), tl.float32)
        room = tl.minimum(U, hi - first) * n_sel
        base = (s0 + first - FIRST) * G * n_sel + g * room
        e = tl.arange(0, U * NS)
        block = tl.load(BLOCKS + base + e, mask=e < room, other=NO_BLOCK)
        # Blocks that end before every query of the tile.
        behind = tl.sum((block < (first + 1) // L_SEL).to(tl.int32), 0)
        count = tl.sum((block < NO_BLOCK).to(tl.int32), 0)
        for i in tl.range(0, behind * SUB):
            acc0, acc1, total, top = _attend_to(
                i, q0, q1, acc0, acc1, total, top, BLOCKS + base, BITS + base, K, V, KD0, KD1, VD0, VD1, s0, G, g, u, t, length, qk,
                L_SEL, SUB, DK, D0, D1, DV, E0, E1, BN, False, TMA, PRECISION,
            )  # fmt: skip
        for i in tl.range(behind * SUB, count * SUB):
            acc0, acc1, total, top = _attend_to(
                i, q0, q1, acc0, acc1, total, top, BLOCKS + base, BITS + base, K, V, KD0, KD1, VD0, VD1, s0, G, g, u, t, length, qk,
                L_SEL, SUB, DK, D0, D1, DV, E0, E1, BN, True, TMA, PRECISION,
            )  # fmt: skip
        acc0, acc1 = store_attention(O, LSE, rows, there, acc0, acc1, total, top, DV, E0, E1)
        if GATED:
            gate_and_store(O_CMP, O_WIN, GATES, OUT, rows, there, acc0, 0, E0, DV)
            if E1 > 0:
                gate_and_store(O_CMP, O_WIN, GATES, OUT, rows, there, acc1, E0, E1, DV)
