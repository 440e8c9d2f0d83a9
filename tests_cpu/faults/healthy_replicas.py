"""Healthy programs whose replicas look as if they parted: uneven data in a `Join`, parameters that stand in for others for a while.

Their checksums are compared (check_divergence).
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.algorithms import Join
from torch.nn.parallel import DistributedDataParallel as DDP

from pytest_nsa import check_divergence, world_size
from tests_cpu.faults.replicas import backward, labelled_batch, small


def train(model, optimizer, rank, step):
    backward(model, optimizer, rank, step)
    optimizer.step()


@check_divergence
@world_size(3)
def test_uneven_data_in_joins(group):
    """A rank without data answers its reductions, and gets the others' parameters when they have ended, too."""
    model = DDP(small())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        with Join([model]):
            for step in range(2 + 2 * ((group.rank + epoch) % 3) if epoch != 1 else 3 * (group.rank > 0)):
                train(model, optimizer, group.rank, 10 * epoch + step)


@check_divergence
@world_size(2)
def test_one_rank_looks_at_averaged_parameters_and_takes_them_back(group):
    model = DDP(small())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    mean = [p.detach().clone() for p in model.parameters()]
    for step in range(6):
        train(model, optimizer, group.rank, step)
        with torch.no_grad():
            for average, value in zip(mean, model.parameters(), strict=True):
                average.lerp_(value, 0.3)
            if group.rank == 0 and step % 2:
                kept = [p.detach().clone() for p in model.parameters()]
                for value, average in zip(model.parameters(), mean, strict=True):
                    value.copy_(average)
                model.module(labelled_batch(9, step)[0])
                for value, old in zip(model.parameters(), kept, strict=True):
                    value.copy_(old)


@check_divergence
@world_size(2)
def test_the_inner_model_is_called_beside_the_wrapped_one(group):
    """On one rank, with gradients on, and nothing comes of it."""
    model = DDP(small())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        if group.rank == 1:
            model.module(labelled_batch(7, step)[0]).argmax(-1)
        train(model, optimizer, group.rank, step)


@check_divergence
@world_size(2)
def test_a_part_is_frozen_and_another_gets_statistics_of_all(group):
    model = DDP(small())
    model.module[0].weight.requires_grad_(True)
    level = nn.Parameter(torch.zeros(3), requires_grad=False)
    model.module.register_parameter("level", level)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        train(model, optimizer, group.rank, step)
        seen = torch.bincount(labelled_batch(group.rank, step)[1], minlength=3).float()
        torch.distributed.all_reduce(seen)
        with torch.no_grad():
            level.add_(0.01 * (seen.mean() - seen).sign())


@check_divergence
@world_size(2)
def test_a_parameter_of_whole_numbers_has_no_norm(group):
    """As quantised weights are: not trained, and compared by none."""
    net = small()
    net.register_parameter("codes", nn.Parameter(torch.arange(6, dtype=torch.int8), requires_grad=False))
    model = DDP(net)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(4):
        train(model, optimizer, group.rank, step)
