"""A few new tokens against a cache: two kernels, four where there are many programs.

1. `scan_keys`: a program reads some tiles of compressed keys, or of the window's, once for all new tokens and heads of a
group, and leaves a part: their attention to these keys alone, with its log-sum-exp. Of compressed tiles also the block scores
(Eq. 9), relative to the largest score of each row in the tile. 2. `pick_blocks`: a program per token and group makes
importance (Eq. 8 to 10) of the block scores, and picks (Eq. 11). 3. `read_blocks`: a program per token, group and pick; a
part each. 4. `sum_parts`: a program per token and head merges the parts of each branch, and gates them (Eq. 5).

`pick_and_read` is 2 to 4 in one: each program picks for itself, merges what `scan_keys` left for some of the heads, and reads
its block; the last of a token and group merges the rest. No program waits for another, and the order of sums does not depend
on which one is last. Each repeats the picking, so that it serves where a GPU runs all programs at once.

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
    add_two,
    divide_two,
    load_two,
    product,
    scale_two,
    store_two,
    zeros_two,
)

HEADS = tl.constexpr(16)  # merged at once: more take too many registers


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
    Q, K_CMP, V_CMP, K_WIN, V_WIN, PART, PART_LSE, SCORES, TOPS, ARRIVED, T, H, G, start, n_cmp, n_win, cmp_tiles, win_tiles,
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
    if pid == 0:
        tl.store(ARRIVED + bg * T + row // h, 0, mask=there & (row % h == 0))
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


@triton.jit
def _pick(
    PART_LSE, SCORES, TOPS, i, bg, T, start, cmp_tiles, cmp_programs, parts, n_blocks,
    n_sel: tl.constexpr, L_SEL: tl.constexpr, LOCAL: tl.constexpr, h: tl.constexpr, STEP: tl.constexpr, BJ: tl.constexpr,
    PAD: tl.constexpr, PP: tl.constexpr, HB: tl.constexpr,
):  # fmt: skip
    """Return 1 for the blocks that new token i picks with its group, else 0: [PAD]; scores are added HB heads at a time."""
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
    return pick_best(importance, (start + i) // L_SEL, n_sel, LOCAL, PAD)


@triton.jit
def _read(
    Q, K, V, PART, PART_LSE, j, part, i, bg, T, H, G, start, first_part, parts, k_stride, v_stride, qk,
    L_SEL: tl.constexpr, SUB: tl.constexpr, h: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, GROUPS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Attend with the heads of a group, for new token i, to sub-block ``part`` % SUB of block j; to nothing where j is -1."""
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


@triton.jit
def _merge(
    PART, PART_LSE, GATES, at, base, row, rows, first_win, first_sel, end,
    DV: tl.constexpr, NP: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Return the gated sum [DV.whole] of parts 0 ... end of a row, at most NP, BP at a time: compression, window, selection."""
    part = tl.arange(0, NP)
    lse = tl.load(PART_LSE + (base + part) * rows + row, mask=part < end, other=float("-inf"))
    is_cmp, is_sel = part < first_win, part >= first_sel
    top_cmp, of_cmp = _gated_share(lse, is_cmp, tl.load(GATES + at * 3).to(tl.float32))
    top_sel, of_sel = _gated_share(lse, is_sel, tl.load(GATES + at * 3 + 1).to(tl.float32))
    top_win, of_win = _gated_share(
        lse, (part >= first_win) & (part < first_sel), tl.load(GATES + at * 3 + 2).to(tl.float32)
    )
    PV: tl.constexpr = DV.whole
    column = tl.arange(0, PV)
    total = tl.zeros([PV], tl.float32)
    for first in range(0, end, BP):
        p = first + tl.arange(0, BP)
        place = (base + p) * rows + row
        x = tl.load(
            PART + place.to(tl.int64)[:, None] * DV.d + column[None, :], mask=(p < end)[:, None] & (column < DV.d)[None, :],
            other=0.0,
        )  # fmt: skip
        some = tl.load(PART_LSE + place, mask=p < end, other=float("-inf"))
        top = tl.where(p < first_win, top_cmp, tl.where(p < first_sel, top_win, top_sel))
        share = tl.where(p < first_win, of_cmp, tl.where(p < first_sel, of_win, of_sel))
        weight = tl.exp2(some - top)
        total += tl.sum(x * tl.where(weight > 0, weight * share, 0.0)[:, None], 0)  # a gate may be infinite
    return total


@triton.jit
def _finish(
    PART, PART_LSE, GATES, SCANNED, OUT, at, base, row, rows, PARTS: tl.constexpr, h: tl.constexpr, DV: tl.constexpr,
    NS: tl.constexpr,
):  # fmt: skip
    """Store SCANNED and the gated selected branch, PARTS parts from ``base`` on, as OUT, for all heads of a token and group."""
    part = tl.arange(0, NS)
    for first in range(0, h, HEADS):
        head = first + tl.arange(0, HEADS)
        there = head < h
        lse = tl.load(
            PART_LSE + (base + part)[:, None] * rows + (row + head)[None, :], mask=(part < PARTS)[:, None] & there[None, :],
            other=float("-inf"),
        )  # fmt: skip
        gate = tl.load(GATES + (at + head) * 3 + 1, mask=there, other=0.0).to(tl.float32)
        top, share = _gated_share(lse, part[:, None] < PARTS, gate)
        acc = zeros_two(HEADS, DV)
        for p in tl.range(0, PARTS, loop_unroll_factor=4):
            place = (base + p).to(tl.int64) * rows + row + head
            x = load_two(PART, place * DV.d, there, DV, True)
            weight = tl.exp2(tl.load(PART_LSE + place, mask=there, other=float("-inf")) - top)[:, None]
            acc = add_two(acc, x, weight)
        y = load_two(SCANNED, (at + head) * DV.d, there, DV, True)
        store_two(OUT, (at + head) * DV.d, there, add_two(y, acc, share[:, None]), DV)


@triton.jit(do_not_specialize=LENGTHS)
def pick_blocks(
    PART_LSE, SCORES, TOPS, PICKS, T, G, start, cmp_tiles, cmp_programs, parts, n_blocks,
    n_sel: tl.constexpr, L_SEL: tl.constexpr, LOCAL: tl.constexpr, h: tl.constexpr, STEP: tl.constexpr, BJ: tl.constexpr,
    PAD: tl.constexpr, PP: tl.constexpr, HB: tl.constexpr,
):  # fmt: skip
    """Write the picks of a new token and group, PICKS int32 [B * T, G, n]. Grid (T, B * G)."""
    i, bg = tl.program_id(0), tl.program_id(1)
    chosen = _pick(
        PART_LSE, SCORES, TOPS, i, bg, T, start, cmp_tiles, cmp_programs, parts, n_blocks, n_sel, L_SEL, LOCAL, h, STEP, BJ, PAD,
        PP, HB,
    )  # fmt: skip
    write_picks(PICKS + ((bg // G * T + i).to(tl.int64) * G + bg % G) * n_sel, chosen, n_sel, PAD)


@triton.jit(do_not_specialize=LENGTHS)
def read_blocks(
    Q, K, V, PICKS, PART, PART_LSE, T, H, G, start, first_part, parts, k_stride, v_stride, qk,
    n_sel: tl.constexpr, L_SEL: tl.constexpr, SUB: tl.constexpr, h: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    GROUPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Attend with the heads of a group, for a new token, to a sub-block that it picked. Grid (n * SUB, T, B * G)."""
    part, i, bg = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    j = tl.load(PICKS + ((bg // G * T + i).to(tl.int64) * G + bg % G) * n_sel + part // SUB)
    _read(
        Q, K, V, PART, PART_LSE, j, part, i, bg, T, H, G, start, first_part, parts, k_stride, v_stride, qk, L_SEL, SUB, h, DK, DV,
        GROUPS, BM, BN,
    )  # fmt: skip


@triton.jit(do_not_specialize=LENGTHS)
def sum_parts(
    PART, PART_LSE, GATES, OUT, T, H, G, first_win, first_sel, parts,
    h: tl.constexpr, DV: tl.constexpr, NP: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Merge and gate all parts of a head of a new token. Grid (B * T, H)."""
    token, head = tl.program_id(0), tl.program_id(1)
    base = (token // T * G + head // h) * parts
    at = (token * H + head).to(tl.int64)
    total = _merge(
        PART, PART_LSE, GATES, at, base, token % T * h + head % h, T * h, first_win, first_sel, parts, DV, NP, BP
    )
    column = tl.arange(0, DV.whole)
    tl.store(OUT + at * DV.d + column, total.to(OUT.dtype.element_ty), mask=column < DV.d)


@triton.jit(do_not_specialize=LENGTHS)
def pick_and_read(
    Q, K, V, GATES, PART, PART_LSE, SCORES, TOPS, PICKS, SCANNED, ARRIVED, OUT, T, H, G, start, cmp_tiles, cmp_programs, n_blocks,
    first_part, parts, k_stride, v_stride, qk,
    n_sel: tl.constexpr, L_SEL: tl.constexpr, SUB: tl.constexpr, LOCAL: tl.constexpr, h: tl.constexpr, STEP: tl.constexpr,
    BJ: tl.constexpr, PAD: tl.constexpr, PP: tl.constexpr, HB: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, NP: tl.constexpr,
    NS: tl.constexpr, BP: tl.constexpr, GROUPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Do what `pick_blocks`, `read_blocks` and `sum_parts` do, a program per sub-block. Grid (n * SUB, T, B * G).

    SCANNED float32 [B, T, H, Dv] takes the gated sum of what `scan_keys` left, and ARRIVED int32 [B * G, T], which that kernel
    sets to 0, counts programs.
    """
    part, i, bg = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token, g, rows = bg // G * T + i, bg % G, T * h
    column = tl.arange(0, DV.whole)
    # Heads part, part + n * SUB, ...: also where there are fewer heads than programs.
    for head in range(part, h, n_sel * SUB):
        at = (token * H + g * h + head).to(tl.int64)
        total = _merge(  # none of the selected branch yet
            PART, PART_LSE, GATES, at, bg * parts, i * h + head, rows, cmp_programs, first_part, first_part, DV, NP, BP
        )  # fmt: skip
        tl.store(SCANNED + at * DV.d + column, total, mask=column < DV.d)
    chosen = _pick(
        PART_LSE, SCORES, TOPS, i, bg, T, start, cmp_tiles, cmp_programs, parts, n_blocks, n_sel, L_SEL, LOCAL, h, STEP, BJ, PAD,
        PP, HB,
    )  # fmt: skip
    if part == 0:
        write_picks(PICKS + (token.to(tl.int64) * G + g) * n_sel, chosen, n_sel, PAD)
    # The block in that slot of PICKS; -1 behind the last.
    mine = (tl.cumsum(chosen, 0) == part // SUB + 1) & (chosen > 0)
    j = tl.max(tl.where(mine, tl.arange(0, PAD), -1), 0)
    _read(
        Q, K, V, PART, PART_LSE, j, part, i, bg, T, H, G, start, first_part, parts, k_stride, v_stride, qk, L_SEL, SUB, h, DK, DV,
        GROUPS, BM, BN,
    )  # fmt: skip
    tl.debug_barrier()  # all threads have stored before one counts the program
    if tl.atomic_add(ARRIVED + bg * T + i, 1, sem="acq_rel", scope="gpu") == n_sel * SUB - 1:
        _finish(
            PART, PART_LSE, GATES, SCANNED, OUT, (token * H + g * h).to(tl.int64), bg * parts + first_part, i * h, rows,
            n_sel * SUB, h, DV, NS,
        )  # fmt: skip
