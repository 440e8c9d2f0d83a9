"""The module of a stall in a backward: at a block's boundary it is the next block, not the one with all its gradients."""

from __future__ import annotations

import pytest

from pytest_nsa.testing import run_example

SOURCE = """
from torch import nn
from torch.utils.checkpoint import checkpoint

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))

    def forward(self, x):
        return x + self.mlp(self.norm(x))

class Net(nn.Module):
    def __init__(self, recomputes=False):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.recomputes = recomputes

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return x

def train(ddp, model):
    ddp.wrap(model)(torch.ones(2, 4, requires_grad=True)).sum().backward()

@pytest.mark.timeout(30)
@world_size(2)
def test_a_recomputation(ddp, group):
    model, calls = Net(recomputes=True), []
    def wait(module, inputs):
        calls.append(1)
        if len(calls) == 2 and group.rank == 1:
            threading.Event().wait()
    model.blocks[1].register_forward_pre_hook(wait)
    train(ddp, model)

@pytest.mark.timeout(30)
@world_size(2)
def test_the_gradient_of_an_output(ddp, group):
    model = Net()
    def wait(gradient):
        if group.rank == 1:
            threading.Event().wait()
    model.blocks[2].mlp.register_forward_hook(lambda module, inputs, output: output.register_hook(wait) and None)
    train(ddp, model)
"""


def test_a_stall_between_two_blocks_is_the_next_one_s(pytester: pytest.Pytester) -> None:
    result = run_example(pytester, SOURCE, "-o", "ranks_hang_after=2")
    modules = {name: (v.ranks, v.module) for name, v in result.verdicts.items()}
    assert modules == {
        "test_a_recomputation": ((1,), "blocks.1.mlp"),
        "test_the_gradient_of_an_output": ((1,), "blocks.2.mlp"),
    }
