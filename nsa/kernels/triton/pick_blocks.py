"""The n best blocks of a query and group (Eq. 11), as picks: int32 [T, G, n], ascending, -1 behind the last.

Block 0 and the LOCAL latest are always picked, and ties go to the lower index. A program has all scores of a query and group
in registers. The threshold falls from maximum to maximum, two operations a score; where as many scores reach it as are
wanted, these are the picks. Else there is a tie at the threshold, and the best are taken one by one.
"""

import triton
import triton.language as tl

from nsa.kernels.triton.rows import LENGTHS


@triton.jit
def write_picks(at, chosen, n_sel: tl.constexpr, PAD: tl.constexpr):
    """Write the set lanes of ``chosen`` (0 or 1, in the order of blocks) to ``at``, -1 behind them."""
    j = tl.arange(0, PAD)
    place = tl.cumsum(chosen, 0) - chosen
    tl.store(at + place, j, mask=(chosen > 0) & (place < n_sel))
    tl.store(at + j, tl.full([PAD], -1, tl.int32), mask=(j >= tl.sum(chosen, 0)) & (j < n_sel))


@triton.jit
def pick_best(score, own, n_sel: tl.constexpr, LOCAL: tl.constexpr, PAD: tl.constexpr):
    """Return 1 for the n_sel best of blocks 0 ... own, block 0 and the LOCAL latest among them, else 0; scores are not negative."""
    j = tl.arange(0, PAD)
    forced = ((j == 0) | (j > own - LOCAL)) & (j <= own)
    score = tl.where(score == score, score, 0.0)  # not a number: the picks must be blocks all the same
    score = tl.where(forced | (j > own), -1.0, score)
    chosen = forced.to(tl.int32)
    wanted = tl.minimum(n_sel, own + 1) - tl.minimum(own + 1, 1 + LOCAL)
    if wanted > 0:
        threshold = float("inf")
        for _ in range(wanted):
            threshold = tl.max(tl.where(score < threshold, score, -1.0), 0)
        if tl.sum((score >= threshold).to(tl.int32), 0) == wanted:
            chosen = tl.where(score >= threshold, 1, chosen)
        else:
            for _ in range(wanted):
                best = tl.max(score, 0)
                hit = j == tl.min(tl.where(score == best, j, PAD), 0)
                chosen = tl.where(hit, 1, chosen)
                score = tl.where(hit, -1.0, score)
    return chosen


@triton.jit(do_not_specialize=LENGTHS)
def select_blocks(
    IMPORTANCE, PICKS, POSITIONS, S, G, FIRST, n_blocks, n_sel: tl.constexpr, L_SEL: tl.constexpr, LOCAL: tl.constexpr,
    PAD: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Select for one query and group; IMPORTANCE has the queries from token FIRST on, PICKS all. Grid (queries * G,)."""
    row = tl.program_id(0)
    token = FIRST + row // G
    if PACKED:
        own = tl.load(POSITIONS + token) // L_SEL
    else:
        own = token % S // L_SEL
    j = tl.arange(0, PAD)
    score = tl.load(IMPORTANCE + row.to(tl.int64) * n_blocks + j, mask=(j <= own) & (j < n_blocks), other=-1.0)
    chosen = pick_best(score, own, n_sel, LOCAL, PAD)
    write_picks(PICKS + (token.to(tl.int64) * G + row % G) * n_sel, chosen, n_sel, PAD)


@triton.jit(do_not_specialize=LENGTHS)
def picks_of_mask(CHOSEN, PICKS, n_blocks, n_sel: tl.constexpr, PAD: tl.constexpr):
    """Write the picks of a selection bool [T, G, Ns], as other backends make it. Grid (T * G,)."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, PAD)
    chosen = tl.load(CHOSEN + row * n_blocks + j, mask=j < n_blocks, other=0).to(tl.int32)
    write_picks(PICKS + row * n_sel, chosen, n_sel, PAD)


@triton.jit(do_not_specialize=LENGTHS)
def mask_of_picks(PICKS, CHOSEN, n_blocks, n_sel: tl.constexpr, PAD: tl.constexpr):
    """Write the selection int8 [T, G, Ns] of picks. Grid (T * G,)."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, PAD)
    found = tl.zeros([PAD], tl.int32)
    for slot in range(n_sel):
        found = tl.where(j == tl.load(PICKS + row * n_sel + slot), 1, found)
    tl.store(CHOSEN + row * n_blocks + j, found.to(tl.int8), mask=j < n_blocks)
