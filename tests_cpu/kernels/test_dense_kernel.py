"""Which of torch's attention kernels serves dense attention: cuDNN's first from Hopper on."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from nsa.kernels import sdpa

CPU = torch.device("cpu")


def drawn(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q [2, 33, 4, 16], k [2, 33, 2, 16] and v [2, 33, 2, 8]."""
    sizes = (4, 16), (2, 16), (2, 8)
    q, k, v = (torch.randn(2, 33, heads, width).to(dtype).requires_grad_() for heads, width in sizes)
    return q, k, v


@pytest.mark.skipif(not sdpa.TAKES_AN_ORDER, reason="this torch takes no order of kernels")
def test_cudnn_is_first_where_it_is_preferred_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[list[int]] = []
    plain = F.scaled_dot_product_attention

    def seen(*args: torch.Tensor, **settings: object) -> torch.Tensor:
        orders.append(torch._C._get_sdp_priority_order())
        return plain(*args, **settings)

    monkeypatch.setattr(F, "scaled_dot_product_attention", seen)
    before = torch._C._get_sdp_priority_order()
    assert not sdpa.prefers_cudnn(CPU)
    wanted = sdpa.dense(*drawn(torch.float32), scale=0.25)
    monkeypatch.setattr(sdpa, "prefers_cudnn", lambda device: True)
    assert sdpa.dense(*drawn(torch.float32), scale=0.25).shape == wanted.shape == (2, 33, 4, 8)
    first = SDPBackend.CUDNN_ATTENTION.value
    assert (orders[0], orders[1][0]) == (before, first)
    assert torch._C._get_sdp_priority_order() == before
