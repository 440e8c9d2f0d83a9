"""B = 0 and S = 0: every parameter gets a gradient of zeros, so that DDP reduces it and no other rank waits."""

from typing import Any

import pytest
import torch

from nsa import KVCache, NSAAttention, Sizes, load_config
from nsa.kernels.backends import BACKENDS
from nsa.model.attention import DenseAttention
from pytest_nsa import world_size
from pytest_nsa.fixtures import DDP, Group

SHAPES = [((0, 10), None), ((1, 0), None), ((1, 0), [0, 0]), ((1, 0), [0, 0, 0])]


def make_layer(**options: Any) -> NSAAttention:
    return NSAAttention(32, 4, 2, 8, v_head_dim=6, **Sizes(8, 4, 16, 4, 16)._asdict(), **options)


def without_zeros(module: torch.nn.Module) -> list[str]:
    """Return the parameters without a gradient, or with one that is not zero."""
    return [name for name, p in module.named_parameters() if p.grad is None or bool(p.grad.any())]


@pytest.mark.parametrize(("shape", "ends"), SHAPES)
@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
@pytest.mark.parametrize("compression", ["mean", "mlp"])
def test_every_parameter_gets_zeros(
    shape: tuple[int, int], ends: list[int] | None, backend: str, compression: str
) -> None:
    for branch in (None, "cmp", "sel", "win"):
        layer = make_layer(backend=backend, compression=compression, force_branch=branch)
        out = layer(torch.randn(*shape, 32), cu_seqlens=None if ends is None else torch.tensor(ends))
        assert out.shape == (*shape, 32)
        out.sum().backward()
        assert without_zeros(layer) == [], branch


@pytest.mark.parametrize("shape", [(0, 10), (1, 0)])
def test_dense_attention_too(shape: tuple[int, int]) -> None:
    layer = DenseAttention(load_config("configs/tiny_cpu.yaml").model)
    out = layer(torch.randn(*shape, layer.w_q.in_features))
    assert out.shape == (*shape, layer.w_q.in_features)
    out.sum().backward()
    assert without_zeros(layer) == []


@pytest.mark.parametrize("branch", [None, "sel"])
@pytest.mark.parametrize(("B", "T"), [(1, 0), (0, 1), (0, 40)])
def test_a_cache_takes_nothing(B: int, T: int, branch: Any) -> None:
    layer, cache = make_layer(force_branch=branch), KVCache()
    x = torch.randn(B, 51, 32)
    with torch.no_grad():
        layer(x[:, :50], cache)
        assert layer(torch.randn(B, T, 32), cache).shape == (B, T, 32)
        if B:  # what follows is as if it had not been called
            torch.testing.assert_close(layer(x[:, 50:], cache), layer(x)[:, 50:], rtol=0, atol=2e-5)
    assert cache.length == 50 + (1 if B else T)


@world_size(2)
@pytest.mark.timeout(60)
@pytest.mark.parametrize(("shape", "ends"), [((0, 10), None), ((1, 0), [0, 0])])
def test_a_rank_without_data_keeps_no_other_waiting(
    group: Group, ddp: DDP, shape: tuple[int, int], ends: list[int] | None
) -> None:
    """The gradient is the mean of the other rank's and zero, in each of two steps."""
    torch.manual_seed(0)
    layer, alone = make_layer(compression="mlp"), make_layer(compression="mlp")
    alone.load_state_dict(layer.state_dict())
    x = torch.randn(1, 40, 32)
    alone(x).square().sum().backward()
    model = ddp.wrap(layer)
    for _ in range(2):
        model.zero_grad()
        if group.rank == 0:
            out = model(torch.randn(*shape, 32), cu_seqlens=None if ends is None else torch.tensor(ends))
        else:
            out = model(x)
        out.square().sum().backward()
        for wanted, found in zip(alone.parameters(), layer.parameters(), strict=True):
            assert wanted.grad is not None
            torch.testing.assert_close(found.grad, wanted.grad / 2, rtol=1e-5, atol=1e-6)
