"""Which of torch's attention kernels serves dense attention: cuDNN's first from Hopper on; a training names it in env.json."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from nsa.kernels import dispatch, sdpa

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_is_the_one_that_torch_chooses(dtype: torch.dtype) -> None:
    q, k, v = drawn(dtype)
    assert sdpa.dense_kernel(q, k, v) in {"flash", "math"}  # what torch has on a CPU
    with torch.nn.attention.sdpa_kernel(SDPBackend.MATH):
        assert sdpa.dense_kernel(q, k, v) == "math"


def test_what_serves_a_model_is_described() -> None:
    shape = 32, 4, 2, 16, 8
    assert dispatch.describe("nsa", "auto", torch.float32, CPU, shape) == {
        "attention": "nsa", "backend": "cpu", "reason": "our tiles serve torch.float32 on cpu",
    }  # fmt: skip
    assert dispatch.describe("dense", "sdpa", torch.float32, CPU, shape)["backend"] == "sdpa"
