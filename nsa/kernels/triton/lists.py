"""Which queries picked each block, and how that is cut into items of work: a counting sort of the picks, without atomics.

A sequence and group has a run of the list, which holds an entry t * n + slot a pick, ordered by block and then by query; so
an entry names the query and which of its picks. The picks of CH queries (a chunk) are counted by block; a scan over the
chunks gives the place where each chunk writes. Blocks' lists are cut into items of at most PIECE entries: int32 [items, 4],
(sequence * G + group, block, first, end in the list), ordered by block, -1 behind the last. Their number is bounded on the
host, so that nothing waits for the device.
"""

import triton
import triton.language as tl

from nsa.kernels.triton.rows import FIELDS, LENGTHS, queries_of, tokens_of


@triton.jit
def _chunk(PICKS, s0, first, hi, g, G, n_sel: tl.constexpr, CH: tl.constexpr, NS: tl.constexpr):
    """Load the picks of CH queries of a sequence and group, from ``first`` on; -1 where there is none."""
    e = tl.arange(0, CH * NS)
    t, slot = first + e // NS, e % NS
    at = ((s0 + t).to(tl.int64) * G + g) * n_sel + slot
    return tl.load(PICKS + at, mask=(t < hi) & (slot < n_sel), other=-1)


@triton.jit
def chunk_of(SEQUENCES, b, chunks, PACKED: tl.constexpr):
    """Return the number of sequence b's first chunk."""
    if PACKED:
        return tl.load(SEQUENCES + b * FIELDS + 6)
    else:
        return b * chunks


@triton.jit
def items_of(
    SEQUENCES, b, g, S, G, LO, HI, FIRST, PIECE, n_sel: tl.constexpr, L_SEL: tl.constexpr, PACKED: tl.constexpr
):
    """Return where the list of a sequence and group begins, and first and end of the room for its items: what its part of the list
    can need at most. FIRST is the first token at work.
    """
    s0, length = tokens_of(SEQUENCES, b, S, PACKED)
    lo, hi = queries_of(SEQUENCES, b, LO, HI, PACKED)
    list0 = ((s0 + lo - FIRST) * G + g * (hi - lo)) * n_sel
    own = tl.cdiv(length, L_SEL) + 1
    if PACKED:
        first = tl.load(SEQUENCES + b * FIELDS + 7) * G + g * own
    else:
        first = (b * G + g) * own
    return list0, list0 // PIECE + first, (list0 + (hi - lo) * n_sel) // PIECE + first + own


@triton.jit(do_not_specialize=LENGTHS)
def count_picks(
    PICKS, COUNTS, SEQUENCES, S, G, LO, HI, chunks, n_blocks,
    n_sel: tl.constexpr, CH: tl.constexpr, NS: tl.constexpr, NB: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Count how many queries of each chunk picked each block: COUNTS [chunks, G, blocks]. Grid (sequences * G, chunks)."""
    c, b, g = tl.program_id(1), tl.program_id(0) // G, tl.program_id(0) % G
    lo, hi = queries_of(SEQUENCES, b, LO, HI, PACKED)
    if lo + c * CH < hi:
        s0, _ = tokens_of(SEQUENCES, b, S, PACKED)
        picked = _chunk(PICKS, s0, lo + c * CH, hi, g, G, n_sel, CH, NS)
        found = tl.histogram(tl.where(picked < 0, NB - 1, picked), NB)  # NB > blocks: the last bin is of no block
        j = tl.arange(0, NB)
        at = ((chunk_of(SEQUENCES, b, chunks, PACKED) + c) * G + g).to(tl.int64) * n_blocks + j
        tl.store(COUNTS + at, found, mask=j < n_blocks)


@triton.jit(do_not_specialize=LENGTHS)
def scan_counts(
    COUNTS, TOTALS, SEQUENCES, G, LO, HI, chunks, n_blocks, CH: tl.constexpr, CC: tl.constexpr, BJ: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Sum: COUNTS become the counts of the chunks before; TOTALS [sequences * G, blocks]. Grid (sequences * G, blocks / BJ)."""
    b, g = tl.program_id(0) // G, tl.program_id(0) % G
    lo, hi = queries_of(SEQUENCES, b, LO, HI, PACKED)
    first, n = chunk_of(SEQUENCES, b, chunks, PACKED), (hi - lo + CH - 1) // CH
    j = tl.program_id(1) * BJ + tl.arange(0, BJ)
    before = tl.zeros([BJ], tl.int32)
    for c0 in range(0, n, CC):
        c = c0 + tl.arange(0, CC)
        at = COUNTS + ((first + c) * G + g).to(tl.int64)[:, None] * n_blocks + j[None, :]
        there = (c < n)[:, None] & (j < n_blocks)[None, :]
        found = tl.load(at, mask=there, other=0)
        tl.store(at, tl.cumsum(found, 0) - found + before[None, :], mask=there)
        before += tl.sum(found, 0)
    tl.store(TOTALS + tl.program_id(0).to(tl.int64) * n_blocks + j, before, mask=j < n_blocks)


@triton.jit
def write_items(ITEMS, STARTS, first, end, list0, total, worker, workers, PIECE, n_blocks, NB: tl.constexpr):
    """Write the items of a sequence and group, the program's first number: worker w of several writes the pieces w, w + workers ...
    of every block's list.

    ``total`` [NB]: the lengths of the lists; STARTS [groups, blocks + 1] receives the items before each block's, from worker 0.
    """
    group = tl.program_id(0)
    j = tl.arange(0, NB)
    offset = list0 + tl.cumsum(total, 0) - total
    pieces = (total + PIECE - 1) // PIECE
    start = first + tl.cumsum(pieces, 0) - pieces
    for piece in range(worker, tl.max(pieces, 0), workers):
        at = ITEMS + (start + piece).to(tl.int64) * 4
        there = piece < pieces
        begin = offset + piece * PIECE
        tl.store(at, tl.zeros([NB], tl.int32) + group, mask=there)
        tl.store(at + 1, j, mask=there)
        tl.store(at + 2, begin, mask=there)
        tl.store(at + 3, tl.minimum(begin + PIECE, offset + total), mask=there)
    used = first + tl.sum(pieces, 0)
    for i0 in range(used + worker * NB, end, workers * NB):
        at = ITEMS + (i0 + j).to(tl.int64) * 4
        tl.store(at, tl.full([NB], -1, tl.int32), mask=i0 + j < end)
    if worker == 0:  # the blocks behind the last have no pieces
        tl.store(STARTS + group.to(tl.int64) * (n_blocks + 1) + j, start, mask=j <= n_blocks)


@triton.jit(do_not_specialize=LENGTHS)
def place_entries(
    PICKS, COUNTS, TOTALS, LISTS, ITEMS, STARTS, SEQUENCES, S, G, LO, HI, FIRST, chunks, n_blocks, PIECE,
    n_sel: tl.constexpr, L_SEL: tl.constexpr, CH: tl.constexpr, NS: tl.constexpr, NB: tl.constexpr, BIG: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Place the entries of a chunk's picks, by a sort of (block, query, slot), and its share of the items.

    Grid (sequences * G, chunks).
    """
    c, b, g = tl.program_id(1), tl.program_id(0) // G, tl.program_id(0) % G
    lo, hi = queries_of(SEQUENCES, b, LO, HI, PACKED)
    if lo + c * CH < hi:
        s0, _ = tokens_of(SEQUENCES, b, S, PACKED)
        first = lo + c * CH
        picked = _chunk(PICKS, s0, first, hi, g, G, n_sel, CH, NS)
        e = tl.arange(0, CH * NS)
        key = tl.sort(tl.where(picked < 0, BIG, picked * (CH * NS) + e))
        there = key < BIG
        block, source = tl.where(there, key // (CH * NS), NB - 1), key % (CH * NS)
        j = tl.arange(0, NB)
        total = tl.load(TOTALS + tl.program_id(0).to(tl.int64) * n_blocks + j, mask=j < n_blocks, other=0)
        list0, begin, end = items_of(SEQUENCES, b, g, S, G, LO, HI, FIRST, PIECE, n_sel, L_SEL, PACKED)
        # An entry's place: where its block's list begins, those of the chunks before, those before it in its chunk.
        at = ((chunk_of(SEQUENCES, b, chunks, PACKED) + c) * G + g).to(tl.int64) * n_blocks + j
        before = tl.load(COUNTS + at, mask=j < n_blocks, other=0)
        here = tl.histogram(block, NB)
        base = list0 + tl.cumsum(total, 0) - total + before - (tl.cumsum(here, 0) - here)
        place = tl.gather(base, block, 0) + e
        tl.store(LISTS + place, (first + source // NS) * n_sel + source % NS, mask=there)
        write_items(ITEMS, STARTS, begin, end, list0, total, c, tl.cdiv(hi - lo, CH), PIECE, n_blocks, NB)


@triton.jit(do_not_specialize=LENGTHS)
def cut_lists(
    TOTALS, ITEMS, STARTS, SEQUENCES, S, G, LO, HI, FIRST, n_blocks, PIECE, n_sel: tl.constexpr, L_SEL: tl.constexpr,
    NB: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Write items of another PIECE from the lists' lengths, for the backward. Grid (sequences * G, workers)."""
    b, g = tl.program_id(0) // G, tl.program_id(0) % G
    j = tl.arange(0, NB)
    total = tl.load(TOTALS + tl.program_id(0).to(tl.int64) * n_blocks + j, mask=j < n_blocks, other=0)
    list0, begin, end = items_of(SEQUENCES, b, g, S, G, LO, HI, FIRST, PIECE, n_sel, L_SEL, PACKED)
    write_items(ITEMS, STARTS, begin, end, list0, total, tl.program_id(1), tl.num_programs(1), PIECE, n_blocks, NB)
