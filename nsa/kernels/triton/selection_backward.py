"""Backward of the selected branch, by block: a program has an item's block of keys, and the rows of its queries as in the
forward.

dk and dv of an item are written as parts and added in the order of items (`sum_items`); dq is a part a row and block, added
in the order of picks (`merge_dq`) to what the other branches left. On Hopper K^T dS is computed for dq, and stored transposed
(TRANSPOSED): its first operand has 64 rows and more, as wgmma wants, where dS^T K has a tile's few rows.

Flat layouts (`rows`). Parts of dq [queries, G, n * SUB, h, Dk] for the queries from token FIRST on; of dk, dv [items * SUB,
BN, D] float32.
"""

import triton
import triton.language as tl

from nsa.kernels.triton.rows import (
    LENGTHS,
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
from nsa.kernels.triton.strided_backward import rows_give


@triton.jit
def _store_transposed(
    base, at, there, x, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    column = FIRST + tl.arange(0, WIDTH)
    mask = there[None, :] & (column < D.d)[:, None]
    tl.store(
        base + at[None, :] + column[:, None], x.to(base.dtype.element_ty), mask=mask, eviction_policy="evict_first"
    )


@triton.jit(do_not_specialize=LENGTHS)
def selected_backward(
    Q, K, V, GRAD, LSE, DELTA, LISTS, ITEMS, PART_DQ, PART_K, PART_V, SEQUENCES, S, H, G, FIRST, qk, scale,
    n_sel: tl.constexpr, L_SEL: tl.constexpr, SUB: tl.constexpr, h: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, TRANSPOSED: tl.constexpr, WIDE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Write the parts of dq, dk and dv of an item and a sub-block. Grid (items, SUB)."""
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
        dk, dv = zeros_two(BN, DK), zeros_two(BN, DV)
        base = s0.to(tl.int64) * H + g * h
        rows = (end - begin) * h
        # A tile's entries are loaded an iteration ahead: a load that waits for a load of its iteration is issued too late.
        ahead = tl.arange(0, BM)
        entry = tl.load(LISTS + begin + ahead // h, mask=ahead < rows, other=0)
        for r0 in tl.range(0, rows, BM, num_stages=STAGES):
            r = r0 + tl.arange(0, BM)
            there = r < rows
            t = entry // n_sel
            row = t.to(tl.int64 if WIDE else tl.int32) * H + r % h
            q = load_two(Q + base * DK.d, row * DK.d, there, DK, True)
            do = load_two(GRAD + base * DV.d, row * DV.d, there, DV, True)
            lse = tl.load(LSE + base + row, mask=there, other=float("inf"))
            delta = tl.load(DELTA + base + row, mask=there, other=0.0)
            p = tl.exp2(product(k, q) * qk - lse[None, :])
            # A list ascends: a block's own queries, which do not see all of it, come first.
            if tl.load(LISTS + begin + r0 // h) // n_sel < (j + 1) * L_SEL:
                p = tl.where(inside[:, None] & (n[:, None] <= t[None, :]), p, 0.0)
            elif SUB * BN > L_SEL:
                p = tl.where(inside[:, None], p, 0.0)
            dk, dv, ds = rows_give(p, v, dk, dv, q, do, delta)
            part = part_of(entry, s0 - FIRST, G, g, sub, n_sel, SUB, WIDE)
            at = (part * h + r % h) * DK.d
            if TRANSPOSED:
                x0 = tl.dot(k[0].T, ds, input_precision="ieee")
                _store_transposed(PART_DQ, at, there, x0 * scale, 0, DK.d0, DK)
                if DK.d1 > 0:
                    x1 = tl.dot(k[1].T, ds, input_precision="ieee")
                    _store_transposed(PART_DQ, at, there, x1 * scale, DK.d0, DK.d1, DK)
            else:
                x0 = tl.dot(ds.T, k[0], input_precision="ieee")
                store_part(PART_DQ, at, there, x0 * scale, 0, DK.d0, DK, "evict_first")
                if DK.d1 > 0:
                    x1 = tl.dot(ds.T, k[1], input_precision="ieee")
                    store_part(PART_DQ, at, there, x1 * scale, DK.d0, DK.d1, DK, "evict_first")
            entry = tl.load(LISTS + begin + (r + BM) // h, mask=r + BM < rows, other=0)
        out = (tl.program_id(0).to(tl.int64) * SUB + sub) * BN + tl.arange(0, BN)
        everywhere = tl.arange(0, BN) < BN
        store_two(PART_K, out * DK.d, everywhere, scale_two(dk, scale), DK)
        store_two(PART_V, out * DV.d, everywhere, dv, DV)


@triton.jit(do_not_specialize=LENGTHS)
def merge_dq(
    PART_DQ, DQ, PICKS, G, FIRST,
    n_sel: tl.constexpr, SUB: tl.constexpr, NS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Sum dq of a query and group: its parts, WIDTH = h * Dk long, in order, and if ADD to what DQ holds.

    Grid (queries * G, WIDTH / BLOCK).
    """
    row = tl.program_id(0).to(tl.int64)
    token = FIRST + row // G
    count = picks_there(PICKS, token * G + row % G, n_sel, NS) * SUB
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    out = DQ + (token * G + row % G) * WIDTH + column
    if ADD:
        total = tl.load(out, mask=column < WIDTH, other=0.0).to(tl.float32)
    else:
        total = tl.zeros([BLOCK], tl.float32)
    for k in range(count):
        at = PART_DQ + (row * (n_sel * SUB) + k) * WIDTH + column
        total += tl.load(at, mask=column < WIDTH, other=0.0, eviction_policy="evict_first").to(tl.float32)
    tl.store(out, total.to(DQ.dtype.element_ty), mask=column < WIDTH)


@triton.jit
def _sum_items(
    PART, OUT, first, end, at, there, inner, SUB: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, BR: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    PD: tl.constexpr = D.whole
    column = tl.arange(0, PD)
    mask = there[:, None] & (column < D.d)[None, :]
    out = OUT + at[:, None] * D.d + column[None, :]
    if ADD:
        total = tl.load(out, mask=mask, other=0.0).to(tl.float32)
    else:
        total = tl.zeros([BR, PD], tl.float32)
    part = PART + ((first.to(tl.int64) * SUB + inner // BN) * BN + inner % BN)[:, None] * D.d + column[None, :]
    for _ in range(first, end):
        total += tl.load(part, mask=mask, other=0.0)
        part += SUB * BN * D.d
    tl.store(out, total.to(OUT.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=LENGTHS)
def sum_items(
    PART_K, PART_V, STARTS, OUT_K, OUT_V, SEQUENCES, S, G, n_blocks,
    L_SEL: tl.constexpr, SUB: tl.constexpr, BN: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BR: tl.constexpr,
    ADD: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Sum dk and dv of BR keys of a block: the parts of its items in order. STARTS [sequences * G, blocks + 1].

    Grid (sequences * G * blocks, L_SEL / BR).
    """
    group, j = tl.program_id(0) // n_blocks, tl.program_id(0) % n_blocks
    b, g = group // G, group % G
    s0, S = tokens_of(SEQUENCES, b, S, PACKED)
    inner = tl.program_id(1) * BR + tl.arange(0, BR)
    n = j * L_SEL + inner
    there = (inner < L_SEL) & (n < S)
    starts = STARTS + group.to(tl.int64) * (n_blocks + 1) + j
    first, end = tl.load(starts), tl.load(starts + 1)
    at = (s0 + n).to(tl.int64) * G + g
    _sum_items(PART_K, OUT_K, first, end, at, there, inner, SUB, BN, DK, BR, ADD)
    _sum_items(PART_V, OUT_V, first, end, at, there, inner, SUB, BN, DV, BR, ADD)
