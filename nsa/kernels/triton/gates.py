"""The gates' backward, and delta: the row sums that a softmax's backward takes from its output and the gradient of it.

Both are sum(grad * o_c) for branch c: a gate's gradient in the gates' dtype, delta in float32. (A branch's own gradient is
its gate times grad, and its row sums g_c * delta; the kernels multiply by the gate where it costs least, `strided_backward`.)

Layouts: a row per query and head; grad, o [rows, Dv], gates [rows, 3], delta [3, rows].
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa.kernels.triton.rows import load_two


@triton.jit
def _row_sums(x0, x1, A, at, there, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr):
    a0, a1 = load_two(A, at, there, D, D0, D1, True)
    total = tl.sum(x0 * a0.to(tl.float32), 1)
    if D1 > 0:
        total += tl.sum(x1 * a1.to(tl.float32), 1)
    return total


@triton.jit
def gates_backward(
    GRAD, O_CMP, O_SEL, O_WIN, D_GATES, DELTA, rows,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of the gates, and delta of the three branches. Grid (rows / BLOCK,)."""
    r = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = r < rows
    x0, x1 = load_two(GRAD, r * D, there, D, D0, D1, True)
    x0, x1 = x0.to(tl.float32), x1.to(tl.float32)
    _sum_of_branch(x0, x1, O_CMP, D_GATES, DELTA, r, there, rows, 0, D, D0, D1)
    _sum_of_branch(x0, x1, O_SEL, D_GATES, DELTA, r, there, rows, 1, D, D0, D1)
    _sum_of_branch(x0, x1, O_WIN, D_GATES, DELTA, r, there, rows, 2, D, D0, D1)


@triton.jit
def _sum_of_branch(
    x0, x1, O, D_GATES, DELTA, r, there, rows, BRANCH: tl.constexpr, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr
):
    total = _row_sums(x0, x1, O, r * D, there, D, D0, D1)
    tl.store(D_GATES + r * 3 + BRANCH, total.to(D_GATES.dtype.element_ty), mask=there)
    tl.store(DELTA + BRANCH * rows + r, total, mask=there)


@triton.jit
def row_sums(GRAD, O, DELTA, rows, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BLOCK: tl.constexpr):
    """Delta of a branch that has no gate. Grid (rows / BLOCK,)."""
    r = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x0, x1 = load_two(GRAD, r * D, r < rows, D, D0, D1, True)
    tl.store(DELTA + r, _row_sums(x0.to(tl.float32), x1.to(tl.float32), O, r * D, r < rows, D, D0, D1), mask=r < rows)
