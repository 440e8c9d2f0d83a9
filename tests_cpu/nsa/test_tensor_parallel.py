"""Attention that torch's tensor parallelism has split by heads equals the whole layer, forward and backward."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from nsa import NSAAttention
from nsa.config import ModelConfig
from nsa.model.attention import DenseAttention
from pytest_nsa.fixtures import Group

SHAPE = ModelConfig(
    dim=32, n_heads=4, n_kv_heads=2, head_dim=8, v_head_dim=6, compress_block=8, compress_stride=4, select_block=16,
    n_select=4, window=16,
)  # fmt: skip
BY_COLUMNS = {
    "nsa": ("w_q", "k_sel", "v_sel", "k_win", "v_win", "k_cmp", "v_cmp", "gate.fc2"),
    "dense": ("w_q", "w_k", "w_v"),
}


@pytest.mark.parametrize("kind", ["nsa", "dense"])
def test_heads_follow_from_what_a_projection_returns(group: Group, kind: str) -> None:
    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        return (NSAAttention.from_config(SHAPE) if kind == "nsa" else DenseAttention(SHAPE)).double()

    whole, split = make(), make()
    plan = {**{name: ColwiseParallel() for name in BY_COLUMNS[kind]}, "out": RowwiseParallel()}
    parallelize_module(split, init_device_mesh("cpu", (2,)), plan)
    x = torch.randn(2, 100, 32, dtype=torch.float64)
    found, wanted = split(x), whole(x)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)
    found.square().sum().backward()
    wanted.square().sum().backward()
    for name, parameter in split.named_parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor):  # what is not split, here gate.fc1, has each rank's share
            torch.testing.assert_close(gradient.full_tensor(), whole.get_parameter(name).grad, rtol=0, atol=1e-10)
