"""What the kernels share: packed rows, head dims in two parts, sequences of a batch or a pack.

Rows. All heads of a group attend to the same keys, so a program's rows are (query, head of the group) pairs: BM rows are BM
// h whole queries; row r is query r // h, head r % h, and rows beyond are idle. Masks depend on the query alone, and the sum
over the heads of a group lies in one program.

Head dims. A kernel is given `tiles.Widths` D of q and k, DK, and of v, DV. D.d columns are loaded as D.d0 + D.d1, both powers of
two (192 = 128 + 64; D.d1 is 0 where D.d is a power of two), as products need; only what is not a sum of two powers is padded with
zeros. What is loaded is a tuple of one part or two; a product over two is two chained products.

Sequences. Tensors are flat over tokens: q [T, H, D]; k, v [T, G, D] or, compressed, [Nc, G, D]. A batch has its sequences at
multiples of S; a pack (PACKED) has a table, int32 [sequences, 8]: first token, tokens, first compressed key, compressed keys,
first and end of the queries at work, first chunk of lists, selection blocks (and one more each) of the sequences before.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
NO_HINT = tl.constexpr("")  # of how long a cache keeps what was read or written
FIELDS = tl.constexpr(8)  # of a sequence in the table
# Arguments of kernels that change with the number or the length of sequences. Triton would compile a kernel again for each that
# becomes 1, or a multiple of 16.
LENGTHS = (
    "S", "N", "BG", "LO", "HI", "FIRST", "SEGMENT", "keys", "rows", "segments", "chunks",
    "start", "n_cmp", "n_win", "cmp_tiles", "win_tiles", "cmp_programs", "win_programs", "each", "parts", "first_part",
    "first_win", "first_sel",
)  # fmt: skip


@triton.jit
def load_part(
    base, at, there, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr,
    EVICT: tl.constexpr = NO_HINT,
):  # fmt: skip
    """Load [len(at), WIDTH]: columns from FIRST on of the rows at ``at`` (in elements); zero beyond D, and, if MASKED, where not
    ``there``.
    """
    column = FIRST + tl.arange(0, WIDTH)
    where = base + at[:, None] + column[None, :]
    if D.d < FIRST + WIDTH:
        if MASKED:
            x = tl.load(where, mask=there[:, None] & (column < D.d)[None, :], other=0.0, eviction_policy=EVICT)
        else:
            x = tl.load(where, mask=(column < D.d)[None, :], other=0.0, eviction_policy=EVICT)
    elif MASKED:
        x = tl.load(where, mask=there[:, None], other=0.0, eviction_policy=EVICT)
    else:
        x = tl.load(where, eviction_policy=EVICT)
    return x


@triton.jit
def load_two(base, at, there, D: tl.constexpr, MASKED: tl.constexpr, EVICT: tl.constexpr = NO_HINT):
    """Load rows in parts."""
    x0 = load_part(base, at, there, 0, D.d0, D, MASKED, EVICT)
    if D.d1 > 0:
        return x0, load_part(base, at, there, D.d0, D.d1, D, MASKED, EVICT)
    else:
        return (x0,)


@triton.jit
def load_described(X0, X1, row, column, D: tl.constexpr):
    """Load the same from a row and column on, by TMA descriptors of the parts."""
    x0 = X0.load([row, column])
    if D.d1 > 0:
        return x0, X1.load([row, column + D.d0])
    else:
        return (x0,)


@triton.jit
def store_part(
    base, at, there, x, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, EVICT: tl.constexpr = NO_HINT
):
    """Store what `load_part` reads, in the pointer's dtype."""
    column = FIRST + tl.arange(0, WIDTH)
    where = base + at[:, None] + column[None, :]
    if D.d < FIRST + WIDTH:
        mask = there[:, None] & (column < D.d)[None, :]
    else:
        mask = there[:, None]
    tl.store(where, x.to(base.dtype.element_ty), mask=mask, eviction_policy=EVICT)


@triton.jit
def store_two(base, at, there, x, D: tl.constexpr, EVICT: tl.constexpr = NO_HINT):
    """Store rows in parts."""
    store_part(base, at, there, x[0], 0, D.d0, D, EVICT)
    if D.d1 > 0:
        store_part(base, at, there, x[1], D.d0, D.d1, D, EVICT)


@triton.jit
def product(a, b):
    """Return a b^T over the parts of the head dim: [rows of a, rows of b] float32; exact of float32, no other of half types."""
    s = tl.dot(a[0], b[0].T, input_precision="ieee")
    if len(a) > 1:
        s = tl.dot(a[1], b[1].T, s, input_precision="ieee")
    return s


@triton.jit
def add_product(p, b, acc):
    """Return an accumulator plus p b, in parts."""
    acc0 = tl.dot(p, b[0], acc[0], input_precision="ieee")
    if len(b) > 1:
        return acc0, tl.dot(p, b[1], acc[1], input_precision="ieee")
    else:
        return (acc0,)


@triton.jit
def zeros_two(N: tl.constexpr, D: tl.constexpr):
    """Return an accumulator of N rows in parts."""
    D0: tl.constexpr = D.d0
    D1: tl.constexpr = D.d1
    if D1 > 0:
        return tl.zeros([N, D0], tl.float32), tl.zeros([N, D1], tl.float32)
    else:
        return (tl.zeros([N, D0], tl.float32),)


@triton.jit
def scale_two(x, by):
    if len(x) > 1:
        return x[0] * by, x[1] * by
    else:
        return (x[0] * by,)


@triton.jit
def divide_two(x, by):
    if len(x) > 1:
        return x[0] / by, x[1] / by
    else:
        return (x[0] / by,)


@triton.jit
def add_two(acc, x, by):
    """Return an accumulator plus ``by`` times x, in parts."""
    if len(x) > 1:
        return acc[0] + x[0].to(tl.float32) * by, acc[1] + x[1].to(tl.float32) * by
    else:
        return (acc[0] + x[0].to(tl.float32) * by,)


@triton.jit
def tokens_of(SEQUENCES, b, S, PACKED: tl.constexpr):
    """Return first token and number of tokens of sequence b."""
    if PACKED:
        return tl.load(SEQUENCES + b * FIELDS), tl.load(SEQUENCES + b * FIELDS + 1)
    else:
        return b * S, S


@triton.jit
def keys_of(SEQUENCES, b, s0, S, N, WINDOWED: tl.constexpr, PACKED: tl.constexpr):
    """Return first key and number of keys of sequence b: its tokens under a window, else its compressed blocks."""
    if WINDOWED:
        return s0, S
    elif PACKED:
        return tl.load(SEQUENCES + b * FIELDS + 2), tl.load(SEQUENCES + b * FIELDS + 3)
    else:
        return b * N, N


@triton.jit
def queries_of(SEQUENCES, b, LO, HI, PACKED: tl.constexpr):
    """Return first and end of the queries at work, counted in sequence b."""
    if PACKED:
        return tl.load(SEQUENCES + b * FIELDS + 4), tl.load(SEQUENCES + b * FIELDS + 5)
    else:
        return LO, HI


@triton.jit
def visible_keys(t, N, STRIDE: tl.constexpr, OFFSET: tl.constexpr):
    """Return how many keys, from the first, query t sees where key n ends at token n * STRIDE + OFFSET."""
    return tl.where(t >= OFFSET, tl.minimum(N, (t - OFFSET) // STRIDE + 1), 0)


@triton.jit
def bounds_of(part: tl.constexpr, start, inside, whole, end):
    """Return where the first, second or third part of a loop begins and ends; the second has no masks."""
    if part == 0:
        return start, tl.minimum(inside, end)
    elif part == 1:
        return inside, whole
    else:
        return whole, end


@triton.jit
def rows_of_tile(s0, first, end, H, g, h: tl.constexpr, BM: tl.constexpr):
    """Return of a program's rows: their queries, counted in the sequence, which are there, and their numbers in the tensors."""
    r = tl.arange(0, BM)
    t = first + r // h
    return t, (r < BM // h * h) & (t < end), (s0 + t).to(tl.int64) * H + g * h + r % h


@triton.jit
def load_lse(LSE, at, there):
    """Load the log-sum-exp, base 2; +inf where there is no row or it saw no key, so that exp2(s - lse) is 0 without a mask."""
    lse = tl.load(LSE + at, mask=there, other=float("inf")) * LOG2E
    return tl.where(lse == float("-inf"), float("inf"), lse)


@triton.jit
def store_attention(O, LSE, rows, there, acc, total, top, DV: tl.constexpr):
    """End an online softmax: store the outputs of rows ``rows`` [T * H]; store their log-sum-exp, base e.

    ``top`` is a row's largest score times log2(e), ``total`` its sum relative to that; a row without keys gives 0 and -inf.
    """
    some = total > 0
    share = 1.0 / tl.where(some, total, 1.0)
    store_two(O, rows * DV.d, there, scale_two(acc, share[:, None]), DV)
    lse = tl.where(some, (top + tl.log2(tl.where(some, total, 1.0))) / LOG2E, float("-inf"))
    tl.store(LSE + rows, lse, mask=there)


@triton.jit
def picks_there(PICKS, row, n_sel: tl.constexpr, NS: tl.constexpr):
    """Return how many blocks the query and group ``row`` picked; -1 is behind the last. NS: n_sel, up to a power of two."""
    slot = tl.arange(0, NS)
    picked = tl.load(PICKS + row.to(tl.int64) * n_sel + slot, mask=slot < n_sel, other=-1)
    return tl.sum((picked >= 0).to(tl.int32), 0)


@triton.jit
def part_of(entry, before, G, g, sub, n_sel: tl.constexpr, SUB: tl.constexpr, WIDE: tl.constexpr):
    """Return the number, among the parts [queries, G, n_sel * SUB], of a list's entry, query * n_sel + pick, and a sub-block.

    ``before`` is added to the query; WIDE: in 64 bits.
    """
    query = (before + entry // n_sel).to(tl.int64 if WIDE else tl.int32)
    return (query * G + g) * (n_sel * SUB) + entry % n_sel * SUB + sub
