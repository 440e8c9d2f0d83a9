"""Forward of the selected branch, by block (as FSA does, arXiv 2508.18224): keys and values of a block are read once for its
queries.

A program has an item (`lists`): a block of keys and some of the queries that picked it. It leaves for each its attention to
that block alone, a part, with its log-sum-exp; a second kernel merges the parts of a query, in order, and, where it is given
gates, sums the three branches (Eq. 5). A block of more keys than BN is several sub-blocks, SUB, each with its own parts.

Flat layouts (`rows`). Parts [queries, G, n * SUB, h, Dv], their log-sum-exps base 2 likewise, for the queries from token
FIRST on.
"""

import triton
import triton.language as tl

from nsa.kernels.triton.rows import (
    LENGTHS,
    LOG2E,
    add_product,
    add_two,
    divide_two,
    load_part,
    load_two,
    part_of,
    picks_there,
    product,
    scale_two,
    store_part,
    store_two,
    tokens_of,
    zeros_two,
)


@triton.jit
def _scores(at_q, entry, r, rows, k, H, n_sel: tl.constexpr, h: tl.constexpr, DK: tl.constexpr, WIDE: tl.constexpr):
    """Return the scores of rows r of an item, with their list's entries; of rows behind the last, zeros."""
    row = (entry // n_sel).to(tl.int64 if WIDE else tl.int32) * H + r % h
    return product(load_two(at_q, row * DK.d, r < rows, DK, True, "evict_last"), k)


@triton.jit(do_not_specialize=LENGTHS)
def selected_forward(
    Q, K, V, LISTS, ITEMS, PART, PART_LSE, SEQUENCES, S, H, G, FIRST, qk,
    n_sel: tl.constexpr, L_SEL: tl.constexpr, SUB: tl.constexpr, h: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr, WIDE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Attend with an item's queries to a sub-block. Grid (items, SUB).

    WIDE: q in a sequence, or the parts, have more elements than 32 bits count. If AHEAD, the scores of a tile are computed an
    iteration ahead, so that its rows arrive while the tile before is weighed and stored; their entries are loaded another one
    ahead, as a load that waits for a load of its iteration is issued too late.
    """
    item = ITEMS + tl.program_id(0).to(tl.int64) * 4
    group = tl.load(item)
    if group >= 0:
        j, begin, end = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
        b, g, sub = group // G, group % G, tl.program_id(1)
        s0, length = tokens_of(SEQUENCES, b, S, PACKED)  # S itself may be a constant, which no branch redefines
        n = j * L_SEL + sub * BN + tl.arange(0, BN)
        inside = n < tl.minimum((j + 1) * L_SEL, length)
        keys = (s0 + n).to(tl.int64) * G + g
        k = load_two(K, keys * DK.d, inside, DK, True)
        v = load_two(V, keys * DV.d, inside, DV, True)
        at_q = Q + (s0.to(tl.int64) * H + g * h) * DK.d
        rows = (end - begin) * h
        if AHEAD:
            ahead = tl.arange(0, BM)
            following = tl.load(LISTS + begin + (BM + ahead) // h, mask=BM + ahead < rows, other=0)
            entry = tl.load(LISTS + begin + ahead // h, mask=ahead < rows, other=0)
            s = _scores(at_q, entry, ahead, rows, k, H, n_sel, h, DK, WIDE)
        for r0 in tl.range(0, rows, BM, num_stages=STAGES):
            r = r0 + tl.arange(0, BM)
            there = r < rows
            entry = tl.load(LISTS + begin + r // h, mask=there, other=0)
            t = entry // n_sel
            if not AHEAD:
                s = _scores(at_q, entry, r, rows, k, H, n_sel, h, DK, WIDE)
            # A list ascends: a block's own queries, which do not see all of it, come first.
            if tl.load(LISTS + begin + r0 // h) // n_sel < (j + 1) * L_SEL:
                s = tl.where(inside[None, :] & (n[None, :] <= t[:, None]), s, float("-inf"))
            elif SUB * BN > L_SEL:
                s = tl.where(inside[None, :], s, float("-inf"))
            top = tl.max(s, 1) * qk
            if SUB > 1:  # of the own block, whole sub-blocks may lie behind the query
                finite = tl.where(top == float("-inf"), 0.0, top)
            else:
                finite = tl.where(there, top, 0.0)
            p = tl.exp2(s * qk - finite[:, None])
            total = tl.sum(p, 1)
            o = add_product(p.to(v[0].dtype), v, zeros_two(BM, DV))
            some = tl.where(total > 0, total, 1.0)
            part = part_of(entry, s0 - FIRST, G, g, sub, n_sel, SUB, WIDE)
            place = part * h + r % h
            store_two(PART, place * DV.d, there, scale_two(o, (1.0 / some)[:, None]), DV, "evict_first")
            tl.store(PART_LSE + place, tl.where(total > 0, finite + tl.log2(some), float("-inf")), mask=there)
            if AHEAD:
                s = _scores(at_q, following, r + BM, rows, k, H, n_sel, h, DK, WIDE)
                following = tl.load(LISTS + begin + (r + 2 * BM) // h, mask=r + 2 * BM < rows, other=0)


@triton.jit(do_not_specialize=LENGTHS)
def merge_parts(
    PART, PART_LSE, O, LSE, O_CMP, O_WIN, GATES, OUT, PICKS, H, G, FIRST,
    n_sel: tl.constexpr, SUB: tl.constexpr, h: tl.constexpr, DV: tl.constexpr, HP: tl.constexpr, NS: tl.constexpr, NP: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """Merge the parts of a query and group to O and LSE; if GATED, OUT = g0 O_CMP + g1 O + g2 O_WIN (Eq. 5).

    A query without picks gives 0 and -inf. Grid (queries * G,).
    """
    row = tl.program_id(0).to(tl.int64)
    token, g = FIRST + row // G, row % G
    count = picks_there(PICKS, token * G + g, n_sel, NS) * SUB
    slot, i = tl.arange(0, NP), tl.arange(0, HP)
    base = row * (n_sel * SUB)
    lse = tl.load(
        PART_LSE + (base + slot[:, None]) * h + i[None, :],
        mask=(slot < count)[:, None] & (i < h)[None, :],
        other=float("-inf"),
    )
    some = (i < h) & (count > 0)
    top = tl.where(some, tl.max(lse, 0), 0.0)
    total = tl.sum(tl.exp2(lse - top[None, :]), 0)
    total = tl.where(some, total, 1.0)
    acc = zeros_two(HP, DV)
    for k in range(count):
        place = (base + k) * h + i
        weight = tl.exp2(tl.load(PART_LSE + place, mask=i < h, other=float("-inf")) - top)
        acc = add_two(acc, load_two(PART, place * DV.d, i < h, DV, True, "evict_first"), weight[:, None])
    out = token * H + g * h + i
    acc = divide_two(acc, total[:, None])
    store_two(O, out * DV.d, i < h, acc, DV)
    tl.store(LSE + out, tl.where(some, (top + tl.log2(total)) / LOG2E, float("-inf")), mask=i < h)
    if GATED:
        gate_and_store(O_CMP, O_WIN, GATES, OUT, out, i < h, acc[0], 0, DV.d0, DV)
        if DV.d1 > 0:
            gate_and_store(O_CMP, O_WIN, GATES, OUT, out, i < h, acc[1], DV.d0, DV.d1, DV)


@triton.jit
def gate_and_store(
    O_CMP, O_WIN, GATES, OUT, rows, there, selected, FIRST: tl.constexpr, WIDTH: tl.constexpr, DV: tl.constexpr
):
    """Store columns from FIRST on of the gated sum."""
    of_cmp = load_part(O_CMP, rows * DV.d, there, FIRST, WIDTH, DV, True).to(tl.float32)
    of_win = load_part(O_WIN, rows * DV.d, there, FIRST, WIDTH, DV, True).to(tl.float32)
    g0 = tl.load(GATES + rows * 3, mask=there, other=0.0).to(tl.float32)
    g1 = tl.load(GATES + rows * 3 + 1, mask=there, other=0.0).to(tl.float32)
    g2 = tl.load(GATES + rows * 3 + 2, mask=there, other=0.0).to(tl.float32)
    total = of_cmp * g0[:, None] + selected * g1[:, None] + of_win * g2[:, None]
    store_part(OUT, rows * DV.d, there, total, FIRST, WIDTH, DV)
