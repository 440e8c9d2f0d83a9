"""Tests that would notice a tracer: by operations that they record, by storages that they free, by parameters that they swap."""

import inspect

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_nsa import world_size


def test_an_output_without_storage(group):  # -> passes
    y = nn.Linear(8, 8)(torch.ones(1000, 8))
    y.untyped_storage().resize_(0)
    del y
    dist.barrier()


@world_size(1)
@pytest.mark.filterwarnings("error::torch.jit.TracerWarning")
def test_a_traced_module(group):  # -> passes
    torch.jit.trace(nn.Linear(8, 8), torch.ones(8))


class Logged(torch.Tensor):
    names = []

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        Logged.names.append(getattr(function, "__name__", str(function)))
        return super().__torch_function__(function, types, args, kwargs or {})


@world_size(1)
def test_a_subclass_that_logs(group):  # -> passes
    nn.Linear(8, 8)(torch.ones(4, 8).as_subclass(Logged))
    assert Logged.names == ["linear"]


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.__name__)
        return function(*args, **kwargs or {})


@world_size(1)
def test_a_mode_that_logs(group):  # -> passes
    model = nn.Linear(8, 8)
    kept = model(torch.ones(4, 8))
    with Operations() as forward:
        loss = model(torch.ones(4, 8)).sum()
        del kept
    assert forward.names == ["ones.default", "t.default", "addmm.default", "sum.default"]
    with Operations() as backward:
        loss.backward()
    assert not [name for name in backward.names if "scalar" in name or "isfinite" in name or "abs" in name]


@world_size(1)
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_a_graph_of_a_backward(group, mode):  # -> passes
    def f(x):
        x = x.detach().requires_grad_()
        (x * x).sum().backward()
        return x.grad

    nodes = make_fx(f, tracing_mode=mode)(torch.ones(4)).graph.nodes
    assert "aten._local_scalar_dense.default" not in [str(node.target) for node in nodes]


@world_size(1)
def test_parameters_that_are_swapped(group):  # -> passes
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model = nn.Linear(8, 8)
        model(torch.ones(8))
        model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@world_size(1)
def test_the_signature_of_backward(group):  # -> passes
    assert "retain_graph" in inspect.signature(torch.autograd.backward).parameters
