"""Rotary positions in one kernel (RoFormer, arXiv 2104.09864), as `nsa.model.attention.Rotary.turn` computes them.

Half i of a head and its other half turn together: y = x cos + swap(x) sin, where swap exchanges the halves and the sines of the
first half are negative. The gradient is the same with the sines exchanged after they are multiplied.
"""

import torch
import triton
import triton.language as tl

from nsa.kernels.triton.launch import launch
from nsa.kernels.triton.rows import LENGTHS

ROWS = 32  # of a program: (token, head) pairs


@triton.jit
def _load_pairs(at, there, HALF: tl.constexpr):
    first = tl.load(at, mask=there, other=0.0).to(tl.float32)
    return first, tl.load(at + HALF, mask=there, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=LENGTHS)
def rotate(
    X, COS, SIN, OUT, rows, N, x_stride, heads: tl.constexpr, D: tl.constexpr, P: tl.constexpr, BR: tl.constexpr,
    BACKWARD: tl.constexpr,
):  # fmt: skip
    """Turn BR rows, both halves of D / 2 columns, P a power of two. COS, SIN [N, D]. Grid (rows / BR,)."""
    HALF: tl.constexpr = D // 2
    r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    c = tl.arange(0, P)
    there = (r < rows)[:, None] & (c < HALF)[None, :]
    token = r // heads
    x = X + (token * x_stride + r % heads * D)[:, None] + c[None, :]
    at = (token % N * D)[:, None] + c[None, :]
    first, second = _load_pairs(x, there, HALF)
    cos0, cos1 = _load_pairs(COS + at, there, HALF)
    sin0, sin1 = _load_pairs(SIN + at, there, HALF)
    if BACKWARD:
        y0, y1 = first * cos0 + second * sin1, second * cos1 + first * sin0
    else:
        y0, y1 = first * cos0 + second * sin0, second * cos1 + first * sin1
    out = OUT + (r * D)[:, None] + c[None, :]
    tl.store(out, y0.to(OUT.dtype.element_ty), mask=there)
    tl.store(out + HALF, y1.to(OUT.dtype.element_ty), mask=there)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, backward: bool) -> torch.Tensor:
    """Return x [B, N, heads, D] turned, contiguous; D even, cos and sin [1, N, 1, D] of x's dtype."""
    B, N, heads, D = x.shape
    if x.stride()[2:] != (D, 1) or (B > 1 and x.stride(0) != N * x.stride(1)):
        x = x.contiguous()
    out = x.new_empty(x.shape)
    rows = B * N * heads
    launch(
        rotate, (triton.cdiv(rows, ROWS),), x, x, cos.contiguous(), sin.contiguous(), out, rows, N, x.stride(1), heads=heads, D=D,
        P=triton.next_power_of_2(D // 2), BR=ROWS, BACKWARD=backward, num_warps=4,
    )  # fmt: skip
    return out
