"""The gates' backward, and what the branches' backward needs of each row: delta, and the log-sum-exp with the gate in it.

delta_c = sum(grad * o_c) is a gate's gradient, and the row sum that a softmax's backward takes. A branch's own gradient is
its gate times grad, so its probabilities appear times their gate everywhere: g exp2(s - lse) = exp2(s - (lse - log2 g)). With
the gate in the log-sum-exp the backward's loops have no gate to load or to multiply by. A gate is what a sigmoid gives (Eq. 5);
of one below zero the logarithm, and with it the gradient, is NaN.

Layouts: a row per query and head; grad, o [rows, Dv], gates [rows, 3], lse, delta, gated_lse [3, rows]; the last is base 2,
and +inf where the row saw no key or its gate is 0, so that exp2(s - lse) is 0 without a mask.
"""

import triton
import triton.language as tl

from nsa.kernels.triton.rows import LENGTHS, load_lse, load_two


@triton.jit
def _row_sums(x, A, at, there, D: tl.constexpr):
    a = load_two(A, at, there, D, True)
    total = tl.sum(x[0].to(tl.float32) * a[0].to(tl.float32), 1)
    if D.d1 > 0:
        total += tl.sum(x[1].to(tl.float32) * a[1].to(tl.float32), 1)
    return total


@triton.jit(do_not_specialize=LENGTHS)
def gates_backward(
    GRAD, O_CMP, O_SEL, O_WIN, GATES, LSE, D_GATES, DELTA, GATED_LSE, rows,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write gradients of the gates, delta and gated log-sum-exp of the three branches. Grid (rows / BLOCK,)."""
    r = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = r < rows
    x = load_two(GRAD, r * D.d, there, D, True)
    _of_branch(x, O_CMP, GATES, LSE, D_GATES, DELTA, GATED_LSE, r, there, rows, 0, D)
    _of_branch(x, O_SEL, GATES, LSE, D_GATES, DELTA, GATED_LSE, r, there, rows, 1, D)
    _of_branch(x, O_WIN, GATES, LSE, D_GATES, DELTA, GATED_LSE, r, there, rows, 2, D)


@triton.jit
def _of_branch(x, O, GATES, LSE, D_GATES, DELTA, GATED_LSE, r, there, rows, BRANCH: tl.constexpr, D: tl.constexpr):
    total = _row_sums(x, O, r * D.d, there, D)
    tl.store(D_GATES + r * 3 + BRANCH, total.to(D_GATES.dtype.element_ty), mask=there)
    at = BRANCH * rows + r
    tl.store(DELTA + at, total, mask=there)
    gate = tl.load(GATES + r * 3 + BRANCH, mask=there, other=0.0).to(tl.float32)
    is_open = gate != 0
    lse = load_lse(LSE, at, there) - tl.log2(tl.where(is_open, gate, 1.0))
    tl.store(GATED_LSE + at, tl.where(is_open, lse, float("inf")), mask=there)


@triton.jit(do_not_specialize=LENGTHS)
def row_sums(GRAD, O, LSE, DELTA, GATED_LSE, rows, D: tl.constexpr, BLOCK: tl.constexpr):
    """Write delta of a branch that has no gate, and its log-sum-exp as the others' are. Grid (rows / BLOCK,)."""
    r = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = r < rows
    x = load_two(GRAD, r * D.d, there, D, True)
    tl.store(DELTA + r, _row_sums(x, O, r * D.d, there, D), mask=there)
    tl.store(GATED_LSE + r, load_lse(LSE, r, there), mask=there)
