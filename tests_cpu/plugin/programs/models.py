"""Models that ranks wrap, reduce or recompute differently, and the module of a stall in a backward."""

# options: -o ranks_hang_after=2
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from pytest_nsa import check_divergence, world_size


class Net(nn.Module):
    def __init__(self, *names):
        super().__init__()
        torch.manual_seed(0)
        layers = {name: nn.Linear(8, 8, bias=False) for name in sorted(names)}
        for name in names:
            self.add_module(name, layers[name])
        self.names = sorted(names)

    def forward(self, x):
        for name in self.names:
            x = torch.relu(getattr(self, name)(x))
        return x


def fit(model, given, reduce=lambda model: None, seed=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        if seed is not None:
            torch.manual_seed(seed + step)
        optimizer.zero_grad()
        model(given()).square().mean().backward()
        reduce(model)
        optimizer.step()
    return model


def train(ddp, model):
    fit(ddp.wrap(model), lambda: torch.ones(4, 8))
    return model


@check_divergence
@world_size(3)
def test_another_order(ddp, group):  # -> FAIL silent_divergence 1 by wrapped.ordered_otherwise in a
    train(ddp, Net("b", "a") if group.rank == 1 else Net("a", "b"))


@check_divergence
def test_the_same_order_by_other_names(ddp, group):  # -> passes
    train(ddp, Net("a", f"own_{group.rank}"))


def test_another_dtype(ddp, group):  # -> collective_mismatch 0,1 by wrapped.incompatible
    model = Net("a", "b")
    train(ddp, model.bfloat16() if group.rank == 1 else model)


def test_fewer(ddp, group):  # -> collective_mismatch 0,1 by wrapped.incompatible
    model = Net("a", "b")
    model.b.requires_grad_(group.rank == 0)
    train(ddp, model)


def test_a_refusal_that_is_expected(ddp, group):  # -> rank_exception 1 by exits.rank_raised
    model = Net("a", "b")
    model.b = nn.Linear(8, 4 + group.rank, bias=False)
    with pytest.raises(RuntimeError):
        train(ddp, model)
    if group.rank == 1:
        raise KeyError("another one")


# Replicas that nothing reduces, on two stages of two ranks.
def two_stages(group, seed):
    own = [dist.new_group([0, 1]), dist.new_group([2, 3])][group.rank // 2]

    def reduce(model):
        if group.rank < 2:
            for p in model.parameters():
                dist.all_reduce(p.grad, group=own)  # HERE test_a_stage_forgets_to_reduce

    torch.manual_seed(seed)
    fit(nn.Linear(4, 4), lambda: torch.randn(2, 4), reduce, 10 * group.rank)


@check_divergence
@world_size(4)
def test_a_stage_forgets_to_reduce(group):  # -> silent_divergence 2,3 by unreduced.unreduced_replicas here
    two_stages(group, group.rank // 2)


@check_divergence
@world_size(4)
def test_ddp_over_one_rank(group):  # -> silent_divergence 2,3 by unreduced.unreduced_replicas
    first = dist.new_group([0, 1])
    own = [dist.new_group([rank]) for rank in range(4)][group.rank]
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4), process_group=first if group.rank < 2 else own)
    fit(model, lambda: torch.randn(2, 4), seed=10 * group.rank)


@check_divergence
@world_size(4)
def test_models_that_begin_differently(group):  # -> passes
    two_stages(group, [0, 0, 2, 3][group.rank])


@check_divergence
@world_size(4)
@pytest.mark.parametrize("seed", ["of the rank", "of all"])  # equal data needs no reduction
def test_no_rank_reduces(group, seed):  # -> passes
    torch.manual_seed(0)
    fit(nn.Linear(4, 4), lambda: torch.randn(2, 4), seed=10 * group.rank if seed == "of the rank" else 7)


# At a block's boundary the module of a stall is the next block, not the one with all its gradients.
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Blocks(nn.Module):
    def __init__(self, recomputes=False):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.recomputes = recomputes

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return x


def run_once(ddp, model):
    ddp.wrap(model)(torch.ones(2, 8, requires_grad=True)).sum().backward()


@pytest.mark.timeout(30)
def test_a_recomputation(ddp, group):  # -> ? 1 in blocks.1.mlp
    model, calls = Blocks(recomputes=True), []

    def wait(module, inputs):
        calls.append(1)
        if len(calls) == 2 and group.rank == 1:
            threading.Event().wait()

    model.blocks[1].register_forward_pre_hook(wait)
    run_once(ddp, model)


@pytest.mark.timeout(30)
def test_the_gradient_of_an_output(ddp, group):  # -> ? 1 in blocks.2.mlp
    model = Blocks()

    def wait(gradient):
        if group.rank == 1:
            threading.Event().wait()

    model.blocks[2].mlp.register_forward_hook(lambda module, inputs, output: output.register_hook(wait) and None)
    run_once(ddp, model)
