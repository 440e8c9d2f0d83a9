"""Triton kernels of the gated sum (Eq. 5): one pass over the three branches' outputs, forward and backward.

Layouts, all contiguous, a row a query and head: o_cmp, o_sel, o_win, out [rows, D]; gates [rows, 3].
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa.kernels.triton_strided import load_rows, store_rows


@triton.jit
def gated_sum(CMP, SEL, WIN, GATES, OUT, rows, D: tl.constexpr, PD: tl.constexpr, BLOCK: tl.constexpr):
    """out = g0 * cmp + g1 * sel + g2 * win. Grid (rows / BLOCK,)."""
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = r < rows
    at = GATES + r.to(tl.int64) * 3
    total = load_rows(CMP, r, there, D, PD) * tl.load(at, mask=there, other=0.0).to(tl.float32)[:, None]
    total += load_rows(SEL, r, there, D, PD) * tl.load(at + 1, mask=there, other=0.0).to(tl.float32)[:, None]
    total += load_rows(WIN, r, there, D, PD) * tl.load(at + 2, mask=there, other=0.0).to(tl.float32)[:, None]
    store_rows(OUT, r, there, total, D, PD)


@triton.jit
def gated_sum_backward(
    GRAD, CMP, SEL, WIN, GATES, D_CMP, D_SEL, D_WIN, D_GATES, rows,
    D: tl.constexpr, PD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each branch's gradient is the gate times grad, and each gate's the product of grad and the branch's output."""
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = r < rows
    grad = load_rows(GRAD, r, there, D, PD).to(tl.float32)
    at = r.to(tl.int64) * 3
    g = tl.load(GATES + at, mask=there, other=0.0).to(tl.float32)
    tl.store(D_GATES + at, tl.sum(grad * load_rows(CMP, r, there, D, PD), 1).to(D_GATES.dtype.element_ty), mask=there)
    store_rows(D_CMP, r, there, grad * g[:, None], D, PD)
    g = tl.load(GATES + at + 1, mask=there, other=0.0).to(tl.float32)
    tl.store(
        D_GATES + at + 1, tl.sum(grad * load_rows(SEL, r, there, D, PD), 1).to(D_GATES.dtype.element_ty), mask=there
    )
    store_rows(D_SEL, r, there, grad * g[:, None], D, PD)
    g = tl.load(GATES + at + 2, mask=there, other=0.0).to(tl.float32)
    tl.store(
        D_GATES + at + 2, tl.sum(grad * load_rows(WIN, r, there, D, PD), 1).to(D_GATES.dtype.element_ty), mask=there
    )
    store_rows(D_WIN, r, there, grad * g[:, None], D, PD)
