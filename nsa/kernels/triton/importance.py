"""Importance of selection blocks (Eq. 8 to 10), from the log-sum-exp of the compressed branch.

A program has the rows (query, head) of a tile as columns: s^T = K q^T. The probabilities are summed over the heads of a query
by one product with a matrix of zeros and ones, and over compressed blocks by one with the strides that both kinds of block
share; so no S x S/d matrix is written. Both products are of float16 (float32 for float32 inputs): the error is 1e-4 of the
importance.

Flat layouts (`rows`); the importance is [queries, G, blocks] float32 for the queries from token FIRST on, and holds nothing
behind a query's own block.
"""

import triton
import triton.language as tl

from nsa.kernels.triton.rows import (
    LENGTHS,
    bounds_of,
    keys_of,
    load_described,
    load_lse,
    load_two,
    product,
    queries_of,
    rows_of_tile,
    tokens_of,
    visible_keys,
)

# Probabilities are scaled by 2^SHIFT, so that small ones keep their digits in float16; 64 heads of 1 stay below its largest number.
SHIFT = tl.constexpr(8.0)


@triton.jit
def _block_scores(
    q, lse, heads_of, found, n0, j, at_k, KD0, KD1, row, column, t, N, k_stride, qk,
    STRIDE: tl.constexpr, OFFSET: tl.constexpr, A: tl.constexpr, R: tl.constexpr, DK: tl.constexpr, BN: tl.constexpr,
    MASKED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    n = n0 + tl.arange(0, BN)
    if TMA:
        k = load_described(KD0, KD1, row + n0, column, DK)
    else:
        k = load_two(at_k, n * k_stride, (n >= 0) & (n < N), DK, MASKED)
    p = tl.exp2(product(k, q) * qk - lse[None, :])
    if MASKED:
        seen = (n * STRIDE + OFFSET)[:, None] <= t[None, :]
        p = tl.where(seen & ((n >= 0) & (n < N))[:, None], p, 0.0)
    summed = tl.dot(p.to(heads_of.dtype), heads_of, input_precision="ieee")  # over the heads: [BN, queries]
    shared = tl.minimum(n[None, :] + A, (j[:, None] + 1) * R) - tl.maximum(n[None, :], j[:, None] * R)
    weight = tl.maximum(shared, 0).to(heads_of.dtype)
    return tl.dot(weight, summed.to(heads_of.dtype), found, input_precision="ieee")


@triton.jit(do_not_specialize=LENGTHS)
def block_importance(
    Q, K, KD0, KD1, LSE, OUT, SEQUENCES, S, N, H, G, BG, LO, HI, FIRST, n_blocks, qk,
    STRIDE: tl.constexpr, OFFSET: tl.constexpr, A: tl.constexpr, R: tl.constexpr, h: tl.constexpr, DK: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BJ: tl.constexpr, STEP: tl.constexpr,
    INNER: tl.constexpr, CLEAR: tl.constexpr, NQ: tl.constexpr, TMA: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Write the importance of blocks up to their own for BM // h queries of a group, the last first, STEP at once.

    Grid (tiles * BG,). A compressed block has A strides, a selection block R; INNER tiles of BN keys cover the STEP * R + A - 1
    strides of STEP blocks; one does if CLEAR, and then those that every query sees whole have no masks.
    """
    BQ: tl.constexpr = BM // h
    bg = tl.program_id(0) % BG
    b, g = bg // G, bg % G
    s0, S = tokens_of(SEQUENCES, b, S, PACKED)
    key0, N = keys_of(SEQUENCES, b, s0, S, N, False, PACKED)
    lo, hi = queries_of(SEQUENCES, b, LO, HI, PACKED)
    first = lo + (tl.cdiv(HI - LO, BQ) - 1 - tl.program_id(0) // BG) * BQ
    if PACKED and first >= hi:
        return
    t, there, rows = rows_of_tile(s0, first, hi, H, g, h, BM)
    q = load_two(Q, rows * DK.d, there, DK, True)
    half: tl.constexpr = tl.float32 if Q.dtype.element_ty == tl.float32 else tl.float16
    lse = load_lse(LSE, rows, there) - SHIFT
    heads_of = ((t - first)[:, None] == tl.arange(0, NQ)[None, :]) & there[:, None]
    heads_of = heads_of.to(half)
    at_k = K + (key0.to(tl.int64) * G + g) * DK.d
    query = tl.arange(0, NQ)
    at = OUT + ((s0 + first - FIRST + query).to(tl.int64) * G + g) * n_blocks
    last = tl.minimum(first + BQ, hi) - 1
    blocks = tl.minimum(n_blocks, last // (R * STRIDE) + 1)
    # The first tile begins before key 0; from the second up to ``clear`` every query sees them whole.
    if CLEAR:
        whole = visible_keys(first, N, STRIDE, OFFSET) - BN + (A - 1)
        clear = tl.where(whole >= STEP * R, whole // (STEP * R), 0) * STEP + STEP
    else:
        clear = STEP
    jj = tl.arange(0, BJ)
    zero = tl.zeros([BJ, NQ], tl.float32)
    for part in tl.static_range(0, 3):
        if part != 1 or CLEAR:
            j_lo, j_hi = bounds_of(part, 0, STEP, tl.minimum(clear, blocks), blocks)
            for j0 in tl.range(j_lo, j_hi, STEP):
                found = zero
                for inner in range(INNER):
                    found = _block_scores(
                        q, lse, heads_of, found, j0 * R - (A - 1) + inner * BN, j0 + jj, at_k, KD0, KD1, key0, g * DK.d, t,
                        N, G * DK.d, qk, STRIDE, OFFSET, A, R, DK, BN, part != 1, TMA and part == 1,
                    )  # fmt: skip
                mask = ((jj < STEP) & (j0 + jj < n_blocks))[:, None] & ((query < BQ) & (first + query < hi))[None, :]
                tl.store(at[None, :] + (j0 + jj)[:, None], found * (1.0 / 256), mask=mask)
