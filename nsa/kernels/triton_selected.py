"""Triton kernels of the selection: the n best blocks, who chose whom, and attention over the chosen blocks.

Two forms of the forward. By query: a program has the heads of a group's query as its rows and walks over the chosen
blocks; rows are filled up to 16, which a group of 16 heads or more does not notice. By block (as in FSA, arXiv 2508.18224):
a program has a block of keys, and rows from the list of the queries that chose it, whatever the number of heads; the
partial results are merged. The gradients of keys and values go by the same lists, in segments whose parts are added in
order: no atomics, the same bits each time.

Layouts, all contiguous: q, o [B, S, H, D]; k, v [B, S, G, D]; chosen bool [B, S, G, Ns]; picks int32 [B, S, G, n],
ascending, -1 where there are fewer; lists int32, the queries t of each block (b, g, j) one after the other, from offsets
[B*G*Ns + 1].
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa.kernels.triton_strided import LOG2E, load_rows, online_softmax, store_rows


@triton.jit
def select_blocks(
    IMPORTANCE, CHOSEN, S, G, n_blocks, n_sel, L_SEL: tl.constexpr, LOCAL: tl.constexpr, PAD: tl.constexpr
):
    """The n_sel best blocks of a query and group (Eq. 11): block 0 and the LOCAL latest first, ties to the lower index.
    Grid (B*S*G,).
    """
    row = tl.program_id(0)
    own = (row // G) % S // L_SEL
    j = tl.arange(0, PAD)
    candidate = j <= own
    score = tl.load(IMPORTANCE + row.to(tl.int64) * n_blocks + j, mask=candidate & (j < n_blocks), other=0.0)
    forced = (j == 0) | (j > own - LOCAL)
    # Importance is not negative, so -1 is below all and any large number above.
    score = tl.where(candidate, tl.where(forced, 3.0e38, score), -1.0)
    chosen = tl.zeros([PAD], tl.int32)
    for _ in range(n_sel):
        best = tl.max(score, 0)
        pick = tl.min(tl.where(score == best, j, PAD), 0)
        hit = (j == pick) & (score >= 0)
        chosen = tl.where(hit, 1, chosen)
        score = tl.where(hit, -1.0, score)
    tl.store(CHOSEN + row.to(tl.int64) * n_blocks + j, chosen.to(tl.int8), mask=j < n_blocks)


@triton.jit
def list_picks(CHOSEN, PICKS, n_blocks, n_sel, PAD: tl.constexpr):
    """The chosen blocks of a row in ascending order. Grid (B*S*G,)."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, PAD)
    chosen = tl.load(CHOSEN + row * n_blocks + j, mask=j < n_blocks, other=0).to(tl.int32)
    place = tl.cumsum(chosen, 0) - chosen
    tl.store(PICKS + row * n_sel + place, j, mask=(chosen > 0) & (place < n_sel))


@triton.jit
def list_queries(CHOSEN, OFFSETS, LISTS, S, G, n_blocks, BT: tl.constexpr, BJ: tl.constexpr):
    """The queries that chose each of BJ blocks, ascending. Grid (Ns / BJ, B * G)."""
    b, g = tl.program_id(1) // G, tl.program_id(1) % G
    j = tl.program_id(0) * BJ + tl.arange(0, BJ)
    at = tl.load(OFFSETS + tl.program_id(1) * n_blocks + j, mask=j < n_blocks, other=0)
    for first in range(0, S, BT):
        t = first + tl.arange(0, BT)
        there = (t < S)[:, None] & (j < n_blocks)[None, :]
        rows = ((b * S + t) * G + g).to(tl.int64)
        chosen = tl.load(CHOSEN + rows[:, None] * n_blocks + j[None, :], mask=there, other=0).to(tl.int32)
        place = at[None, :] + tl.cumsum(chosen, 0) - chosen
        tl.store(LISTS + place, tl.broadcast_to(t[:, None], [BT, BJ]), mask=chosen > 0)
        at += tl.sum(chosen, 0)


@triton.jit
def selected_by_query(
    Q, K, V, PICKS, O, LSE, S, H, G, n_sel, scale,
    L_SEL: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PK: tl.constexpr, PV: tl.constexpr, BH: tl.constexpr,
    BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program: one query and the heads of one group. Grid (S, B * G)."""
    t = tl.program_id(0)
    b, g = tl.program_id(1) // G, tl.program_id(1) % G
    h = H // G
    lane = tl.arange(0, BH)
    rows = (b * S + t) * H + g * h + lane
    q = load_rows(Q, rows, lane < h, DK, PK)
    top = tl.full([BH], float("-inf"), tl.float32)
    total = tl.zeros([BH], tl.float32)
    acc = tl.zeros([BH, PV], tl.float32)
    for slot in range(n_sel):
        j = tl.load(PICKS + ((b * S + t) * G + g) * n_sel + slot)
        if j >= 0:
            for inner in range(0, L_SEL, BN):
                n = j * L_SEL + inner + tl.arange(0, BN)
                seen = (n <= t) & (n < (j + 1) * L_SEL)
                keys = (b * S + n) * G + g
                k = load_rows(K, keys, seen, DK, PK)
                v = load_rows(V, keys, seen, DV, PV)
                scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E)
                scores = tl.where(seen[None, :], scores, float("-inf"))
                top, total, acc, p = online_softmax(scores, top, total, acc)
                acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    store_rows(O, rows, lane < h, acc / total[:, None], DV, PV)
    tl.store(LSE + rows, (top + tl.log2(total)) / LOG2E, mask=lane < h)


@triton.jit
def selected_dq(
    Q, K, V, PICKS, DO, LSE, DELTA, DQ, S, H, G, n_sel, scale,
    L_SEL: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PK: tl.constexpr, PV: tl.constexpr, BH: tl.constexpr,
    BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program: dq of one query and the heads of one group. Grid (S, B * G)."""
    t = tl.program_id(0)
    b, g = tl.program_id(1) // G, tl.program_id(1) % G
    h = H // G
    lane = tl.arange(0, BH)
    rows = (b * S + t) * H + g * h + lane
    q = load_rows(Q, rows, lane < h, DK, PK)
    do = load_rows(DO, rows, lane < h, DV, PV)
    lse = tl.load(LSE + rows, mask=lane < h, other=0.0)
    delta = tl.load(DELTA + rows, mask=lane < h, other=0.0)
    dq = tl.zeros([BH, PK], tl.float32)
    for slot in range(n_sel):
        j = tl.load(PICKS + ((b * S + t) * G + g) * n_sel + slot)
        if j >= 0:
            for inner in range(0, L_SEL, BN):
                n = j * L_SEL + inner + tl.arange(0, BN)
                seen = (n <= t) & (n < (j + 1) * L_SEL)
                keys = (b * S + n) * G + g
                k = load_rows(K, keys, seen, DK, PK)
                v = load_rows(V, keys, seen, DV, PV)
                scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
                p = tl.where(seen[None, :], tl.exp2((scores - lse[:, None]) * LOG2E), 0.0)
                ds = p * (tl.dot(do, tl.trans(v), input_precision=PRECISION) - delta[:, None])
                dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    store_rows(DQ, rows, lane < h, dq * scale, DK, PK)


@triton.jit
def selected_by_block(
    Q, K, V, PICKS, OFFSETS, LISTS, TILE_BLOCK, TILE_START, PART, PART_LSE, S, H, G, n_blocks, n_sel, scale,
    L_SEL: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PK: tl.constexpr, PV: tl.constexpr, PN: tl.constexpr,
    BR: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program: BR rows (query, head) of one block's list; leaves their attention to that block alone. Grid (tiles,)."""
    block = tl.load(TILE_BLOCK + tl.program_id(0))
    if block >= 0:
        group, j = block // n_blocks, block % n_blocks
        b, g = group // G, group % G
        h = H // G
        offset = tl.load(OFFSETS + block)
        count = tl.load(OFFSETS + block + 1) - offset
        r = (tl.program_id(0) - tl.load(TILE_START + block)) * BR + tl.arange(0, BR)
        there = r < count * h
        t = tl.load(LISTS + offset + r // h, mask=there, other=0)
        q = load_rows(Q, (b * S + t) * H + g * h + r % h, there, DK, PK)
        top = tl.full([BR], float("-inf"), tl.float32)
        total = tl.zeros([BR], tl.float32)
        acc = tl.zeros([BR, PV], tl.float32)
        for inner in range(0, L_SEL, BN):
            n = j * L_SEL + inner + tl.arange(0, BN)
            inside = (n < (j + 1) * L_SEL) & (n < S)
            keys = (b * S + n) * G + g
            k = load_rows(K, keys, inside, DK, PK)
            v = load_rows(V, keys, inside, DV, PV)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E)
            scores = tl.where(inside[None, :] & (n[None, :] <= t[:, None]), scores, float("-inf"))
            top, total, acc, p = online_softmax(scores, top, total, acc)
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        # Its place among the query's picks: how many of them come before.
        slot = tl.arange(0, PN)
        row = (b * S + t) * G + g
        picks = tl.load(
            PICKS + row[:, None] * n_sel + slot[None, :], mask=there[:, None] & (slot < n_sel)[None, :], other=-1
        )
        before = tl.sum(((picks >= 0) & (picks < j)).to(tl.int32), 1)
        place = (row.to(tl.int64) * n_sel + before) * h + r % h
        total = tl.where(there, total, 1.0)
        store_rows(PART, place, there, acc / total[:, None], DV, PV)
        tl.store(PART_LSE + place, (top + tl.log2(total)) / LOG2E, mask=there)


@triton.jit
def merge_parts(
    PICKS, PART, PART_LSE, O, LSE, H, G, n_sel,
    DV: tl.constexpr, PV: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """The partial results of a query and group, merged by their log-sum-exp. Grid (B*S*G,)."""
    row = tl.program_id(0).to(tl.int64)
    h = H // G
    lane = tl.arange(0, BH)
    top = tl.full([BH], float("-inf"), tl.float32)
    for slot in range(n_sel):
        if tl.load(PICKS + row * n_sel + slot) >= 0:
            top = tl.maximum(top, tl.load(PART_LSE + (row * n_sel + slot) * h + lane, mask=lane < h, other=0.0))
    total = tl.zeros([BH], tl.float32)
    acc = tl.zeros([BH, PV], tl.float32)
    for slot in range(n_sel):
        if tl.load(PICKS + row * n_sel + slot) >= 0:
            place = (row * n_sel + slot) * h + lane
            weight = tl.exp2((tl.load(PART_LSE + place, mask=lane < h, other=0.0) - top) * LOG2E)
            total += weight
            acc += weight[:, None] * load_rows(PART, place, lane < h, DV, PV).to(tl.float32)
    out = row // G * H + row % G * h + lane
    store_rows(O, out, lane < h, acc / total[:, None], DV, PV)
    tl.store(LSE + out, top + tl.log2(total) / LOG2E, mask=lane < h)


@triton.jit
def selected_dkv(
    Q, K, V, DO, LSE, DELTA, OFFSETS, LISTS, TILE_BLOCK, TILE_START, PART_K, PART_V, S, H, G, n_blocks, scale,
    L_SEL: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PK: tl.constexpr, PV: tl.constexpr, SEGMENT: tl.constexpr,
    BR: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program: what SEGMENT rows (query, head) of one block's list give to BN of its keys. Grid (segments, L_SEL / BN)."""
    block = tl.load(TILE_BLOCK + tl.program_id(0))
    if block >= 0:
        group, j = block // n_blocks, block % n_blocks
        b, g = group // G, group % G
        h = H // G
        offset = tl.load(OFFSETS + block)
        count = tl.load(OFFSETS + block + 1) - offset
        first = (tl.program_id(0) - tl.load(TILE_START + block)) * SEGMENT
        inner = tl.program_id(1) * BN + tl.arange(0, BN)
        n = j * L_SEL + inner
        inside = (inner < L_SEL) & (n < S)
        keys = (b * S + n) * G + g
        k = load_rows(K, keys, inside, DK, PK)
        v = load_rows(V, keys, inside, DV, PV)
        dk = tl.zeros([BN, PK], tl.float32)
        dv = tl.zeros([BN, PV], tl.float32)
        for start in range(first, tl.minimum(first + SEGMENT, count * h), BR):
            r = start + tl.arange(0, BR)
            there = r < count * h
            t = tl.load(LISTS + offset + r // h, mask=there, other=0)
            rows = (b * S + t) * H + g * h + r % h
            q = load_rows(Q, rows, there, DK, PK)
            do = load_rows(DO, rows, there, DV, PV)
            lse = tl.load(LSE + rows, mask=there, other=0.0)
            delta = tl.load(DELTA + rows, mask=there, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            seen = there[:, None] & inside[None, :] & (n[None, :] <= t[:, None])
            p = tl.where(seen, tl.exp2((scores - lse[:, None]) * LOG2E), 0.0)
            dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
            ds = p * (tl.dot(do, tl.trans(v), input_precision=PRECISION) - delta[:, None])
            dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)
        part = tl.program_id(0) * L_SEL + inner
        store_rows(PART_K, part, inner < L_SEL, dk * scale, DK, PK)
        store_rows(PART_V, part, inner < L_SEL, dv, DV, PV)


@triton.jit
def sum_segments(
    PART, TILE_START, OUT, S, G, n_blocks, L_SEL: tl.constexpr, D: tl.constexpr, PD: tl.constexpr, BN: tl.constexpr
):
    """The segments of each block added in order. Grid (B*G*Ns, L_SEL / BN)."""
    block = tl.program_id(0)
    group, j = block // n_blocks, block % n_blocks
    inner = tl.program_id(1) * BN + tl.arange(0, BN)
    n = j * L_SEL + inner
    total = tl.zeros([BN, PD], tl.float32)
    for segment in range(tl.load(TILE_START + block), tl.load(TILE_START + block + 1)):
        total += load_rows(PART, segment * L_SEL + inner, inner < L_SEL, D, PD)
    store_rows(OUT, (group // G * S + n) * G + group % G, (inner < L_SEL) & (n < S), total, D, PD)
