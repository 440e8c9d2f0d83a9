"""A few new tokens against a cache, in four kernels.

1. `scan_keys`: a program reads some tiles of compressed keys, or of the window's, once for all new tokens and heads of a
group, and leaves a part: their attention to these keys alone, with its log-sum-exp. Of compressed tiles also the block scores
(Eq. 9), relative to the largest score of each row in the tile. 2. `pick_blocks`: a program per token and group makes
importance (Eq. 8 to 10) of the block scores, and picks (Eq. 11). 3. `read_blocks`: a program per token, group and pick; a
part each. 4. `sum_parts`: a program per token and head merges the parts of each branch, and gates them (Eq. 5).

Layouts: q, out [B, T, H, D], gates [B, T, H, 3], contiguous. Keys and values [B, N, G, D] as `nsa.model.decoding.KVCache` keeps
them: views of a longer buffer, so that a sequence's stride is given. Parts [B * G, parts, T * h, Dv] float32, log-sum-exps
base 2. Token i of the new ones has position ``start`` + i.
"""

import triton
import triton.language as tl

from nsa.kernels.triton.pick_blocks import pick_best, write_picks
from nsa.kernels.triton.rows import (
    LENGTHS,
    add_product,
    divide_two,
    load_two,
    product,
    scale_two,
    store_two,
    zeros_two,
)


@triton.jit
def _scan(
    q, t, there, row, at_k, at_v, first, tiles, N, stride, offset, window, qk, out, PART, PART_LSE, SCORES, TOPS, tiles_at, rows, A,
    R,
    STEP: tl.constexpr, BJ: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, G_DK: tl.constexpr, G_DV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SCORED: tl.constexpr,
):  # fmt: skip
    """Attend to tiles ``first`` ... of keys; key n ends at token n * stride + offset. Where SCORED, a tile is STEP blocks."""
    acc = zeros_two(BM, DV)
    total = tl.zeros([BM], tl.float32)
    top = tl.full([BM], float("-inf"), tl.float32)
    for number in range(first, first + tiles):
        if SCORED:
            own = number * STEP * R  # keys before it, of which its first block takes strides, belong to the tile before
            n = own - (A - 1) + tl.arange(0, BN)
            mine = (n >= own) & (n < own + STEP * R)
        else:
            n = number * BN + tl.arange(0, BN)
            mine = n >= 0
        inside = (n >= 0) & (n < N)
        k = load_two(at_k, n.to(tl.int64) * G_DK, inside, DK, True)
        v = load_two(at_v, n.to(tl.int64) * G_DV, inside, DV, True)
        token = n * stride + offset
        seen = inside[None, :] & (token[None, :] <= t[:, None]) & (t[:, None] - token[None, :] < window)
        s = tl.where(seen, product(q, k) * qk, float("-inf"))
        if SCORED:
            of_tile = tl.max(s, 1)
            finite = tl.where(of_tile == float("-inf"), 0.0, of_tile)
            p = tl.exp2(s - finite[:, None])
            j = number * STEP + tl.arange(0, BJ)
            shared = tl.minimum(n[:, None] + A, (j[None, :] + 1) * R) - tl.maximum(n[:, None], j[None, :] * R)
            weight = tl.maximum(shared, 0).to(tl.float32)
            found = tl.dot(p, weight, input_precision="ieee")
            at = SCORES + (tiles_at + number * rows + row).to(tl.int64)[:, None] * BJ + tl.arange(0, BJ)[None, :]
            tl.store(at, found, mask=there[:, None])
            tl.store(TOPS + tiles_at + number * rows + row, of_tile, mask=there)
        s = tl.where(mine[None, :], s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        finite = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(s - finite[:, None])
        shrink = tl.exp2(top - finite)
        total = total * shrink + tl.sum(p, 1)
        acc = add_product(p.to(v[0].dtype), v, scale_two(acc, shrink[:, None]))
        top = new_top
    some = tl.where(total > 0, total, 1.0)
    at = (out * rows + row).to(tl.int64)
    store_two(PART, at * DV.d, there, divide_two(acc, some[:, None]), DV)
    tl.store(PART_LSE + at, tl.where(total > 0, top + tl.log2(some), float("-inf")), mask=there)


@triton.jit(do_not_specialize=LENGTHS)
def scan_keys(
    Q, K_CMP, V_CMP, K_WIN, V_WIN, PART, PART_LSE, SCORES, TOPS, T, H, G, start, n_cmp, n_win, cmp_tiles, win_tiles,
    cmp_programs, win_programs, each, parts, k_cmp_stride, v_cmp_stride, k_win_stride, v_win_stride, window, qk,
    STRIDE: tl.constexpr, OFFSET: tl.constexpr, A: tl.constexpr, R: tl.constexpr, h: tl.constexpr, STEP: tl.constexpr,
    BJ: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, GROUPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Attend to ``each`` tiles of compressed keys, or of the window's. Grid (cmp_programs + win_programs, T * h / BM, B * G)."""
    pid, bg = tl.program_id(0), tl.program_id(2)
    b, g = bg // G, bg % G
    row = tl.program_id(1) * BM + tl.arange(0, BM)
    rows = T * h
    there = row < rows
    t = start + row // h
    at_q = ((b * T + row // h) * H + g * h + row % h).to(tl.int64)
    q = load_two(Q, at_q * DK.d, there, DK, True)
    out = bg * parts + pid
    if pid < cmp_programs:
        first = pid * each
        at_k, at_v = K_CMP + b.to(tl.int64) * k_cmp_stride + g * DK.d, V_CMP + b.to(tl.int64) * v_cmp_stride + g * DV.d
        _scan(
            q, t, there, row, at_k, at_v, first, tl.minimum(each, cmp_tiles - first), n_cmp, STRIDE, OFFSET, 1 << 30, qk, out, PART,
            PART_LSE, SCORES, TOPS, bg * cmp_tiles * rows, rows, A, R, STEP, BJ, DK, DV, GROUPS * DK.d, GROUPS * DV.d, BM, BN, True,
        )  # fmt: skip
    else:
        first = (pid - cmp_programs) * each
        at_k, at_v = K_WIN + b.to(tl.int64) * k_win_stride + g * DK.d, V_WIN + b.to(tl.int64) * v_win_stride + g * DV.d
        _scan(
            q, t, there, row, at_k, at_v, first, tl.minimum(each, win_tiles - first), n_win, 1, start + T - n_win, window, qk, out,
            PART, PART_LSE, SCORES, TOPS, 0, rows, A, R, STEP, BJ, DK, DV, GROUPS * DK.d, GROUPS * DV.d, BM, BN, False,
        )  # fmt: skip


@triton.jit(do_not_specialize=LENGTHS)
def pick_blocks(
    PART_LSE, SCORES, TOPS, PICKS, T, G, start, cmp_tiles, cmp_programs, parts, n_blocks,
    n_sel: tl.constexpr, L_SEL: tl.constexpr, LOCAL: tl.constexpr, h: tl.constexpr, STEP: tl.constexpr, BJ: tl.constexpr,
    PAD: tl.constexpr, PP: tl.constexpr, HB: tl.constexpr,
):  # fmt: skip
    """Write the picks of a new token and group, PICKS int32 [B * T, G, n]; scores are added HB heads at a time. Grid (T, B * G)."""
    i, bg = tl.program_id(0), tl.program_id(1)
    j, c = tl.arange(0, PAD), tl.arange(0, PP)
    tile, rows = j // STEP, T * h
    there = (j < n_blocks) & (tile < cmp_tiles)
    importance = tl.zeros([PAD], tl.float32)
    for first in range(0, h, HB):
        head = first + tl.arange(0, HB)
        row = i * h + head
        at = (bg * parts + c)[None, :] * rows + row[:, None]
        lse = tl.load(PART_LSE + at, mask=(c < cmp_programs)[None, :] & (head < h)[:, None], other=float("-inf"))
        top = tl.max(lse, 1)
        total = tl.sum(tl.exp2(lse - tl.where(top > float("-inf"), top, 0.0)[:, None]), 1)
        # +inf where a row saw no key: it weighs nothing.
        lse_of_row = tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), float("inf"))
        at = (bg * cmp_tiles + tile)[None, :] * rows + row[:, None]
        mask = there[None, :] & (head < h)[:, None]
        scores = tl.load(SCORES + at.to(tl.int64) * BJ + (j % STEP)[None, :], mask=mask, other=0.0)
        tops = tl.load(TOPS + at, mask=mask, other=float("-inf"))
        importance += tl.sum(scores * tl.exp2(tops - lse_of_row[:, None]), 0)
    chosen = pick_best(importance, (start + i) // L_SEL, n_sel, LOCAL, PAD)
    write_picks(PICKS + ((bg // G * T + i).to(tl.int64) * G + bg % G) * n_sel, chosen, n_sel, PAD)


@triton.jit(do_not_specialize=LENGTHS)
def read_blocks(
    Q, K, V, PICKS, PART, PART_LSE, T, H, G, start, first_part, parts, k_stride, v_stride, qk,
    n_sel: tl.constexpr, L_SEL: tl.constexpr, SUB: tl.constexpr, h: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    GROUPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Attend with the heads of a group, for a new token, to a sub-block that it picked; to nothing behind its last pick.

    Grid (n * SUB, T, B * G).
    """
    part, i, bg = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    j = tl.load(PICKS + ((bg // G * T + i).to(tl.int64) * G + bg % G) * n_sel + part // SUB)
    b, g = bg // G, bg % G
    t = start + i
    head = tl.arange(0, BM)
    there = head < h
    n = j * L_SEL + part % SUB * BN + tl.arange(0, BN)
    n = tl.where(j >= 0, n, t + 1)  # of no pick, keys that the token does not see
    seen = (n < (j + 1) * L_SEL) & (n <= t)
    at_q = ((b * T + i) * H + g * h + head).to(tl.int64)
    q = load_two(Q, at_q * DK.d, there, DK, True)
    at = n.to(tl.int64)
    k = load_two(K + b.to(tl.int64) * k_stride + g * DK.d, at * (GROUPS * DK.d), seen, DK, True)
    v = load_two(V + b.to(tl.int64) * v_stride + g * DV.d, at * (GROUPS * DV.d), seen, DV, True)
    s = tl.where(seen[None, :], product(q, k) * qk, float("-inf"))
    top = tl.max(s, 1)
    finite = tl.where(top == float("-inf"), 0.0, top)
    p = tl.exp2(s - finite[:, None])
    total = tl.sum(p, 1)
    some = tl.where(total > 0, total, 1.0)
    o = divide_two(add_product(p.to(v[0].dtype), v, zeros_two(BM, DV)), some[:, None])
    place = (bg * parts + first_part + part).to(tl.int64) * (T * h) + i * h + head
    store_two(PART, place * DV.d, there, o, DV)
    tl.store(PART_LSE + place, tl.where(total > 0, finite + tl.log2(some), float("-inf")), mask=there)


@triton.jit
def _gated_share(lse, mine, gate):
    """Return the largest log-sum-exp of a branch, to which the parts ``mine`` belong (0 where it saw no key), and the gate over
    the sum of 2^(lse - largest).
    """
    top = tl.max(tl.where(mine, lse, float("-inf")), 0)
    finite = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.where(mine, tl.exp2(lse - finite), 0.0), 0)
    return finite, gate / tl.where(total > 0, total, 1.0)


@triton.jit(do_not_specialize=LENGTHS)
def sum_parts(
    PART, PART_LSE, GATES, OUT, T, H, G, first_win, first_sel, parts,
    h: tl.constexpr, DV: tl.constexpr, NP: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Merge and gate the parts of a head of a new token, at most NP, BP at a time. Grid (B * T, H)."""
    token, head = tl.program_id(0), tl.program_id(1)
    base, row, rows = (token // T * G + head // h) * parts, token % T * h + head % h, T * h
    at = (token * H + head).to(tl.int64)
    part = tl.arange(0, NP)
    lse = tl.load(PART_LSE + (base + part) * rows + row, mask=part < parts, other=float("-inf"))
    is_cmp, is_sel = part < first_win, part >= first_sel
    top_cmp, of_cmp = _gated_share(lse, is_cmp, tl.load(GATES + at * 3).to(tl.float32))
    top_sel, of_sel = _gated_share(lse, is_sel, tl.load(GATES + at * 3 + 1).to(tl.float32))
    top_win, of_win = _gated_share(
        lse, (part >= first_win) & (part < first_sel), tl.load(GATES + at * 3 + 2).to(tl.float32)
    )
    PV: tl.constexpr = DV.whole
    column = tl.arange(0, PV)
    total = tl.zeros([PV], tl.float32)
    for first in range(0, parts, BP):
        p = first + tl.arange(0, BP)
        place = (base + p) * rows + row
        x = tl.load(
            PART + place.to(tl.int64)[:, None] * DV.d + column[None, :], mask=(p < parts)[:, None] & (column < DV.d)[None, :],
            other=0.0,
        )  # fmt: skip
        some = tl.load(PART_LSE + place, mask=p < parts, other=float("-inf"))
        top = tl.where(p < first_win, top_cmp, tl.where(p < first_sel, top_win, top_sel))
        share = tl.where(p < first_win, of_cmp, tl.where(p < first_sel, of_win, of_sel))
        weight = tl.exp2(some - top)
        total += tl.sum(x * tl.where(weight > 0, weight * share, 0.0)[:, None], 0)  # a gate may be infinite
    tl.store(OUT + at * DV.d + column, total.to(OUT.dtype.element_ty), mask=column < DV.d)
