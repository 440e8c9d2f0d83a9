"""NSA as `sdpa` computes it, by torch's math attention alone, where `sdpa` leaves torch the choice.

So no flash, memory-efficient or cuDNN kernel runs, forward or backward.
"""

import functools
from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from nsa.kernels import sdpa
from nsa.kernels.blocks import select
from nsa.kernels.reference import compressed

__all__ = ["compressed", "select", "selected", "sliding"]


def _by_math(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(function)
    def called(*args: torch.Tensor, **settings: float) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return function(*args, **settings)

    return called


selected, sliding = _by_math(sdpa.selected), _by_math(sdpa.sliding)
