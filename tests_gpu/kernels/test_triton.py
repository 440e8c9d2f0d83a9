"""The Triton kernels on a GPU, against float64 by the equations on the same GPU. `pytest -m gpu tests_gpu/kernels`."""

from __future__ import annotations

import pytest
import torch

from nsa import explain, nsa_attention
from nsa.kernels import blocks, ops, reference, triton_ops

pytestmark = pytest.mark.gpu

# The largest error of an output of size about 1, and of a gradient relative to its largest.
TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.float16: (4e-3, 1e-2), torch.bfloat16: (3e-2, 5e-2)}
SHAPES = {
    "paper": (1, 1100, 64, 4, 192, 128), "125m": (2, 1537, 12, 2, 64, 64), "multi-query": (1, 700, 8, 1, 128, 128),
    "multi-head": (1, 500, 4, 4, 64, 64), "short": (3, 20, 12, 2, 64, 64),
}  # fmt: skip


def leaves(dtype: torch.dtype, *sizes: tuple[int, ...]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Random tensors in ``dtype``, and the same numbers in float64."""
    rounded = [torch.randn(size, device="cuda", dtype=torch.float64).to(dtype) for size in sizes]
    return [x.clone().requires_grad_() for x in rounded], [x.double().requires_grad_() for x in rounded]


def compare(found: torch.Tensor, wanted: torch.Tensor, inputs: list[torch.Tensor], exact: list[torch.Tensor]) -> None:
    """Output and gradients."""
    forward, backward = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=forward)
    weight = torch.randn_like(wanted).to(found.dtype)
    gradients = torch.autograd.grad(found, inputs, weight, allow_unused=True, materialize_grads=True)
    expected = torch.autograd.grad(wanted, exact, weight.double(), allow_unused=True, materialize_grads=True)
    for a, e in zip(gradients, expected, strict=True):
        if e.numel():
            assert (a.double() - e).abs().max() <= backward * max(1.0, float(e.abs().max()))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_each_branch(shape: str, dtype: torch.dtype) -> None:
    B, S, H, G, Dk, Dv = SHAPES[shape]
    scale, n_cmp, n_blocks = Dk**-0.5, blocks.num_compressed(S, 32, 16), blocks.num_selection(S, 64)
    inputs, exact = leaves(dtype, (B, S, H, Dk), (B, S, G, Dk), (B, S, G, Dv))
    compare(ops.sliding(*inputs, 512, scale, "triton")[0], reference.sliding(*exact, w=512, scale=scale), inputs, exact)
    chosen = blocks.select(torch.rand(B, S, G, n_blocks, device="cuda"), 64, 8)
    wanted = reference.selected(*exact, chosen, l_sel=64, n_sel=8, scale=scale)
    compare(ops.selected(*inputs, chosen, 64, 8, scale, "triton")[0], wanted, inputs, exact)
    for form in (triton_ops.by_query, triton_ops.by_block):
        out, _ = form(*(x.detach() for x in inputs), chosen, 64, 8, scale)
        torch.testing.assert_close(out.double(), wanted, rtol=0, atol=TOLERANCE[dtype][0])
    inputs, exact = leaves(dtype, (B, S, H, Dk), (B, n_cmp, G, Dk), (B, n_cmp, G, Dv))
    found, _, importance = ops.compressed(*inputs, 32, 16, 64, scale, "triton")
    wanted, expected = reference.compressed(*exact, l=32, d=16, l_sel=64, scale=scale)
    compare(found, wanted, inputs, exact)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(importance.double(), expected, rtol=0, atol=tolerance * H // G + tolerance)


def test_selection_equals_sorting() -> None:
    for importance in (
        torch.rand(2, 3000, 4, 47),
        torch.zeros(1, 1000, 1, 16),
        torch.randint(0, 3, (1, 2000, 2, 32)).float(),
    ):
        importance = importance.cuda()
        assert torch.equal(triton_ops.select(importance, 64, 16), blocks.select(importance, 64, 16))


def test_the_same_bits_every_time() -> None:
    inputs, _ = leaves(
        torch.bfloat16,
        (1, 3000, 12, 64),
        *((1, n, 2, 64) for n in (186, 186, 3000, 3000, 3000, 3000)),
        (1, 3000, 12, 3),
    )
    sizes = {"l": 32, "d": 16, "l_sel": 64, "n_sel": 16, "w": 512}
    assert explain("auto", torch.bfloat16, inputs[0].device)[0] == "triton"
    runs = []
    for _ in range(3):
        out = nsa_attention(*inputs, **sizes)
        runs.append([out.detach(), *torch.autograd.grad(out.square().sum(), inputs)])
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


def test_memory_grows_as_the_length() -> None:
    """But for the block scores: no S x S matrix, and none of S x S/d."""
    peaks = []
    for S in (8192, 16384):
        n = blocks.num_compressed(S, 32, 16)
        inputs, _ = leaves(torch.bfloat16, (1, S, 12, 64), *((1, m, 2, 64) for m in (n, n, S, S, S, S)), (1, S, 12, 3))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        nsa_attention(*inputs, l=32, d=16, l_sel=64, n_sel=16, w=512).sum().backward()
        scores = S * (S // 64) * 2 * 5  # bytes: importance in float32, and the selection
        peaks.append(torch.cuda.max_memory_allocated() - before - scores)
    assert peaks[1] < 2.6 * peaks[0]
