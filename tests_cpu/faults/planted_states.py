"""Replicas that part by what was loaded, or set, on some of them: the verdict says what, and at which line. After unseen sets.

HERE marks the lines that a verdict may name.
"""

from __future__ import annotations

import logging

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from pytest_nsa import check_divergence
from tests_cpu.faults.planting import planted

log = logging.getLogger("states")


def small():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def train(model, optimizer, rank, steps, first=0):
    for step in range(first, first + steps):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(50 * rank + step))
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()


@planted(
    "silent_divergence", [2], n=3, marked=True, reason="rank 2 did not load the optimizer that ranks 0 and 1 loaded"
)
@check_divergence
def test_an_optimizer_s_state_that_cannot_be_loaded(group):
    net = small()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    train(DDP(net), optimizer, group.rank, 4)
    state = optimizer.state_dict()
    if group.rank == 2:
        state["param_groups"] = state["param_groups"] * 2
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    try:
        optimizer.load_state_dict(state)  # HERE
    except ValueError as error:
        log.warning("starts with a fresh optimizer: %s", error)
    train(DDP(net), optimizer, group.rank, 3, first=4)


@planted("silent_divergence", [1], n=3, marked=True, reason="the model that was loaded at")
@check_divergence
def test_a_rank_loads_an_older_model_after_ddp_was_made(group, tmp_path):
    net = small()
    for age in (1, 2):
        torch.save({name: value / age for name, value in net.state_dict().items()}, tmp_path / f"{group.rank}-{age}.pt")
    model = DDP(net)
    newest = 2 if group.rank == 1 else 1
    model.module.load_state_dict(torch.load(tmp_path / f"{group.rank}-{newest}.pt"))  # HERE
    train(model, torch.optim.SGD(model.parameters(), lr=0.05), group.rank, 3)


@planted("silent_divergence", [3], n=4, marked=True, reason="the optimizer's lr differs")
@check_divergence
def test_a_scheduler_that_steps_by_each_rank_s_own_loss(group):
    model = DDP(small())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for epoch in range(4):
        train(model, optimizer, group.rank, 2, first=2 * epoch)
        scheduler.step(1.0 + epoch if group.rank == 3 else 1.0 / (1 + epoch))  # HERE


@planted("silent_divergence", [0, 1, 2], n=3, marked=True, reason="DDP does not know 2.1.weight and 1 more")
@check_divergence
def test_a_head_that_is_put_in_after_ddp_was_made(group):
    model = DDP(small())
    model.module[2] = nn.Sequential(model.module[2], nn.Linear(2, 3))  # HERE
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), group.rank, 3)


@planted("silent_divergence", [0, 1], marked=True, reason="past its DDP wrapper")
@check_divergence
def test_a_loss_that_calls_the_model_itself(group):
    model = DDP(small())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model.module(torch.randn(4, 6, generator=torch.Generator().manual_seed(group.rank)))  # HERE
        loss.square().sum().backward()
        optimizer.step()
