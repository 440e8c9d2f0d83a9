"""Checks of the Triton kernels in Triton's interpreter: a process of its own, as TRITON_INTERPRET is read when they are imported.

TRITON_INTERPRET=1 python -m tests_cpu.kernels.interpreted SEED NAME...
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from nsa import nsa_attention
from nsa.kernels import blocks, ops, reference, triton_ops

CHECKS: dict[str, Callable[[], None]] = {}
Inputs = list[torch.Tensor]


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Make it one that a test can ask for by name."""
    CHECKS[function.__name__] = function
    return function


def random(*shape: int) -> torch.Tensor:
    """float64, with a gradient; each run other numbers."""
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


def compare(found: torch.Tensor, wanted: torch.Tensor, f_inputs: Inputs, w_inputs: Inputs, tolerance: float) -> None:
    """Output and every gradient against float64."""
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=tolerance)
    weight = torch.randn_like(wanted)
    gradients = torch.autograd.grad(found, f_inputs, weight.to(found.dtype), allow_unused=True, materialize_grads=True)
    expected = torch.autograd.grad(wanted, w_inputs, weight, allow_unused=True, materialize_grads=True)
    for a, e in zip(gradients, expected, strict=True):
        torch.testing.assert_close(a.double(), e, rtol=0, atol=10 * tolerance)


def low(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """The same numbers in another dtype, as leaves."""
    return [x.detach().to(dtype).requires_grad_() for x in inputs]


@check
def window() -> None:
    """Odd lengths, batch, Dk unlike Dv, w of no tile's size; float32 and float16."""
    for S, H, G, w, dtype, tolerance in ((77, 4, 2, 24, torch.float32, 1e-5), (40, 3, 1, 100, torch.float16, 1e-2)):
        inputs = [random(2, S, H, 24), random(2, S, G, 24), random(2, S, G, 12)]
        f_inputs = low(inputs, dtype)
        rounded = low(f_inputs, torch.float64)
        found = ops.sliding(*f_inputs, w, 0.3, "triton")[0]
        compare(found, reference.sliding(*rounded, w=w, scale=0.3), f_inputs, rounded, tolerance)


@check
def compression() -> None:
    """Output, gradients and importance; the first tokens see no block."""
    for S, H, G, l, d, l_sel in ((90, 4, 2, 8, 4, 16), (50, 6, 1, 16, 8, 8)):
        n = blocks.num_compressed(S, l, d)
        inputs = [random(1, S, H, 16), random(1, n, G, 16), random(1, n, G, 8)]
        f_inputs = low(inputs, torch.float32)
        found, _, importance = ops.compressed(*f_inputs, l, d, l_sel, 0.3, "triton")
        wanted, expected = reference.compressed(*inputs, l=l, d=d, l_sel=l_sel, scale=0.3)
        compare(found, wanted, f_inputs, inputs, 1e-5)
        torch.testing.assert_close(importance.double(), expected, rtol=0, atol=1e-5)
        assert torch.equal(found[:, : l - 1], torch.zeros_like(found[:, : l - 1]))


@check
def selection() -> None:
    """The same blocks as by sorting, with ties: all-equal scores, and scores in steps."""
    for importance in (torch.rand(2, 50, 2, 4), torch.zeros(1, 90, 1, 6), torch.randint(0, 3, (1, 90, 1, 6)).float()):
        for n_sel in (3, 5):
            assert torch.equal(triton_ops.select(importance, 16, n_sel), blocks.select(importance, 16, n_sel))


def _selected(form: str) -> None:
    triton_ops.WIDE_GROUP = 1 if form == "query" else 1000
    for S, H, G, l_sel, n_sel in ((70, 6, 2, 8, 4), (45, 2, 1, 24, 3)):
        inputs = [random(1, S, H, 16), random(1, S, G, 16), random(1, S, G, 8)]
        chosen = blocks.select(torch.rand(1, S, G, blocks.num_selection(S, l_sel)), l_sel, n_sel)
        f_inputs = low(inputs, torch.float32)
        found = ops.selected(*f_inputs, chosen, l_sel, n_sel, 0.3, "triton")[0]
        wanted = reference.selected(*inputs, chosen, l_sel=l_sel, n_sel=n_sel, scale=0.3)
        compare(found, wanted, f_inputs, inputs, 1e-5)


@check
def selected_by_query() -> None:
    """A query at a time."""
    _selected("query")


@check
def selected_by_block() -> None:
    """A block of keys at a time, with segments shorter than a list."""
    triton_ops.SEGMENT = 32
    _selected("block")


@check
def whole() -> None:
    """`nsa_attention` as a user calls it, a pack with an empty sequence, the gates' gradients; twice, to the bit."""
    lengths = [5, 0, 40]
    S, settings = sum(lengths), {"l": 8, "d": 4, "l_sel": 16, "n_sel": 3, "w": 12}
    n = sum(blocks.num_compressed(s, 8, 4) for s in lengths)
    inputs = [random(1, S, 4, 16), *(random(1, m, 2, 16) for m in (n, n, S, S, S, S)), random(1, S, 4, 3)]
    ends = torch.tensor([0, 5, 5, 45])
    wanted = nsa_attention(*inputs, **settings, cu_seqlens=ends, backend="reference")
    outputs, gradients = [], []
    for _ in range(2):
        f_inputs = low(inputs, torch.float32)
        found = nsa_attention(*f_inputs, **settings, cu_seqlens=ends, backend="triton")
        outputs.append(found.detach())
        gradients.append(torch.autograd.grad(found.sum(), f_inputs, retain_graph=True))
    compare(found, wanted, f_inputs, inputs, 1e-5)
    assert torch.equal(*outputs)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


if __name__ == "__main__":
    torch.manual_seed(int(sys.argv[1]))
    for name in sys.argv[2:]:
        CHECKS[name]()
        print("held", name)
