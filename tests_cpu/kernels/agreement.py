"""Random inputs of the attention, the same in float64, and the comparison of outputs and gradients: for tests of every backend."""

import torch

from nsa import reference_attention
from nsa.kernels import blocks
from nsa.sizes import Sizes

Inputs = list[torch.Tensor]
SCALE = 2.0**-10  # scores of some thousands after it, which float32 has to 1e-3


def sizes_of_inputs(B: int, S: int, H: int, G: int, Dk: int, Dv: int, n_cmp: int) -> list[tuple[int, ...]]:
    """Return the sizes of `nsa_attention`'s tensors: q, keys and values of each branch, gates."""
    return [(B, S, H, Dk), *((B, n, G, D) for n in (n_cmp, S, S) for D in (Dk, Dv)), (B, S, H, 3)]


def leaves(dtype: torch.dtype, *sizes: tuple[int, ...], device: str = "cpu") -> tuple[Inputs, Inputs]:
    """Return random tensors in ``dtype``, and the same numbers in float64; gates (width 3) are not negative, as after a sigmoid."""
    drawn = [torch.randn(size, device=device, dtype=torch.float64) for size in sizes]
    rounded = [(x.abs() if x.shape[-1] == 3 else x).to(dtype) for x in drawn]
    return [x.clone().requires_grad_() for x in rounded], [x.double().requires_grad_() for x in rounded]


def gradients(output: torch.Tensor, inputs: Inputs, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the gradient of the weighted sum of an output by each input; zeros where it does not depend on one."""
    return torch.autograd.grad(output, inputs, weight.to(output.dtype), allow_unused=True, materialize_grads=True)


def assert_agreement(
    found: torch.Tensor,
    wanted: torch.Tensor,
    inputs: Inputs,
    exact: Inputs,
    tolerance: float,
    of_gradients: float,
    *,
    relative: float = 0.0,
    again: torch.Tensor | None = None,
) -> None:
    """Compare output and every gradient with float64, and bit by bit with those of ``again``, the same computation."""
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=tolerance)
    weight = torch.randn_like(wanted).to(found.dtype)
    of_found = gradients(found, inputs, weight)
    for a, e in zip(of_found, gradients(wanted, exact, weight), strict=True):
        torch.testing.assert_close(a.double(), e, rtol=relative, atol=of_gradients)
    if again is not None:
        assert torch.equal(found, again)
        assert all(map(torch.equal, of_found, gradients(again, inputs, weight)))


def large_scores(S: int, dtype: torch.dtype) -> tuple[Sizes, Inputs, torch.Tensor]:
    """Return sizes, the inputs of `nsa_attention` for S tokens, and its output in float64 for the scale `SCALE`.

    q k^T is beyond float16's range. Queries and keys are small integers times powers of two: scores are exact in float32, whatever
    the order of the sum. All blocks are selected, so that rounding cannot change which.
    """
    sizes = Sizes(8, 4, 16, 3 + S // 16, 24)
    n = blocks.num_compressed(S, *sizes[:2])
    q = 128.0 * torch.randint(-3, 4, (1, S, 4, 32))
    keys = [64.0 * torch.randint(-3, 4, (1, m, 2, 32)) for m in (n, S, S)]
    assert (q.transpose(1, 2) @ keys[1].repeat_interleave(2, 2).permute(0, 2, 3, 1)).abs().max() > 65504
    values = [torch.randn(1, m, 2, 16) for m in (n, S, S)]
    inputs = [
        x.to(dtype) for x in (q, *(x for pair in zip(keys, values, strict=True) for x in pair), torch.rand(1, S, 4, 3))
    ]
    exact = [x.double() for x in inputs]
    return sizes, inputs, reference_attention(*exact, sizes=sizes, scale=SCALE)
