"""Half-precision inputs of which q k^T is beyond float16's range, exact in float32, and the attention to them in float64."""

import torch

from nsa import reference_attention
from nsa.kernels import blocks
from nsa.sizes import Sizes

Inputs = list[torch.Tensor]
SCALE = 2.0**-10  # scores of some thousands after it, which float32 has to 1e-3


def large_scores(S: int, dtype: torch.dtype) -> tuple[Sizes, Inputs, torch.Tensor]:
    """Return sizes, the inputs of `nsa_attention` for S tokens, and its output in float64 for the scale `SCALE`.

    Queries and keys are small integers times powers of two: scores are exact in float32, whatever the order of the sum. All
    blocks are selected, so that rounding cannot change which.
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
