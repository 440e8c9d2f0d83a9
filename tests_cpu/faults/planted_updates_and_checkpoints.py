"""Checkpoints that one rank cannot write, models that differ, graphs that change or grow, and updates that go wrong."""

import time
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from pytest_nsa import check_divergence
from tests_cpu.faults.planting import AT, planted


class Reader:
    """The position in a stream, which cannot be saved while the stream is open."""

    def __init__(self, is_open):
        self.is_open = is_open

    def __getstate__(self):
        if self.is_open:
            raise TypeError("cannot save an open stream")
        return {"is_open": False}


@planted(
    "rank_exception", [1], n=3, marked=True, reason="on rank 1, for which every rank raises", family="raise", origin="second witness"
)  # fmt: skip
def test_a_stream_of_one_rank_cannot_be_saved(group, tmp_path):
    state = {"weight": torch.ones(4), f"reader.{group.rank}": Reader(group.rank == 1)}
    dcp.save(state, checkpoint_id=str(tmp_path.parent / "saved"))  # HERE


@planted(
    "collective_mismatch", [1], n=3, marked=True, reason="the models differ", family="mismatch", origin="second witness"
)
def test_one_rank_builds_its_layers_without_a_bias(group):
    has_bias = {0: "llama", 1: "gpt", 2: "llama"}[group.rank] == "llama"
    DDP(nn.Sequential(nn.Linear(4, 4, bias=has_bias), nn.ReLU(), nn.Linear(4, 2, bias=has_bias)))  # HERE


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.depth = 3

    def forward(self, x):
        for block in self.blocks[: self.depth]:
            x = block(x).relu()
        return x.sum()


@planted("static_graph_changed", [0, 1], family="autograd", origin="second witness")
def test_a_shallower_model_from_a_step_on_under_a_static_graph(group):
    torch.manual_seed(0)
    net = Deep()
    model = DDP(net, static_graph=True)
    for step in range(6):
        net.depth = 3 if step < AT else 1
        model(torch.randn(2, 6)).backward()


class Counter(nn.Module):
    """Adds up a sequence position by position."""

    def __init__(self):
        super().__init__()
        self.rate = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        states = [x[:, 0]]
        for t in range(1, x.shape[1]):
            states.append(states[-1] * self.rate + x[:, t])
        return torch.stack(states, 1)


@planted("graph_explosion", [0, 1], reason="recurrence makes", family="slow", origin="second witness")
def test_a_recurrence_over_each_position(group):
    layers = OrderedDict(embed=nn.Linear(64, 64), recurrence=Counter())
    DDP(nn.Sequential(layers))(torch.ones(1, 20_000, 64)).sum().backward()


@planted("slow", [0, 1, 2], n=3, family="slow", origin="second witness")
def test_every_rank_waits_for_its_images(group):
    model = DDP(nn.Linear(4, 4))
    for _ in range(2000):
        time.sleep(0.3)
        model(torch.ones(2, 4)).sum().backward()


@planted("straggler", [2], n=3, marked=True, family="slow", origin="second witness")
def test_one_rank_validates_on_all_of_its_data(group):
    model = nn.Linear(8, 8)
    for step in range(4):
        if (group.rank, step) == (2, AT):
            for _ in range(100_000):
                time.sleep(0.01)  # HERE
                model(torch.ones(1, 8))  # HERE
        dist.all_reduce(torch.ones(1))


def make(seed=0):
    torch.manual_seed(seed)
    net = nn.Linear(6, 3)
    return DDP(net), torch.optim.SGD(net.parameters(), lr=0.1)


def step_of(model, optimizer, step):
    optimizer.zero_grad()
    model(torch.full((2, 6), step + 1.0)).square().mean().backward()
    optimizer.step()


@planted("silent_divergence", [1], n=3, family="numbers", origin="second witness")
@check_divergence
def test_weights_are_rounded_on_one_rank_and_the_test_compares_them(group):
    model, optimizer = make()
    for step in range(5):
        step_of(model, optimizer, step)
        if group.rank == 1 and step == AT:
            with torch.no_grad():
                model.module.weight.copy_(model.module.weight.bfloat16())
    low, high = model.module.weight.sum().detach().clone(), model.module.weight.sum().detach().clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    assert low == high


@planted("nan_loss", [0, 1], family="numbers", origin="second witness")
@check_divergence
def test_a_rate_at_which_the_weights_overflow(group):
    model, optimizer = make()
    for group_ in optimizer.param_groups:
        group_["lr"] = 1e20
    for step in range(5):
        step_of(model, optimizer, step)
    dist.barrier()


@planted("silent_divergence", [0], family="numbers", origin="second witness")
@check_divergence
def test_one_rank_clips_its_gradients_after_they_are_reduced(group):
    model, optimizer = make()
    for step in range(6):
        optimizer.zero_grad()
        model(torch.full((2, 6), step + 1.0)).square().mean().backward()
        if group.rank == 0 and step == AT:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()


@planted("data_dependent_branch", [0], reason="no shard", family="branch", origin="second witness")
def test_one_rank_skips_what_it_has_no_shard_for(group):
    dist.barrier()
    if group.rank == 0:
        pytest.skip("no shard here")
    dist.all_reduce(torch.ones(1))


@planted("collective_mismatch", [0], marked=True, reason="gave different", family="mismatch", origin="second witness")
def test_a_worker_gives_half_of_its_rows_in_one_round(group):
    for step in range(5):
        x = torch.ones(2 if group.rank == 0 and step == AT else 6)
        parts = [torch.empty(6) for _ in range(2)] if group.rank == 1 else None
        dist.gather(x, parts, dst=1)  # HERE


def write_shards() -> None:
    dist.barrier()  # HERE


def link_latest() -> None:
    dist.barrier()


@planted("extra_collective", [0], n=3, marked=True, family="extra", origin="public reports 2026-11-29")
def test_only_the_first_rank_calls_a_save_that_meets_the_others(group):
    """Its barrier is paired with the others' next one: the call that it makes too much is not the one in which it waits."""
    for _ in range(4):
        dist.all_reduce(torch.ones(2))
    if group.rank == 0:
        write_shards()
    link_latest()
