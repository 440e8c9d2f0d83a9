"""Programs in which a signal ends the process."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from pytest_nsa.fixtures import DDP, Group
from tests_cpu.faults.later import later_group, synchronize
from tests_cpu.faults.planting import AT, Net, net, planted, train


class Training:
    """Each step reduces gradients and a loss, and asks the device for the loss at its end."""

    def __init__(self, rank: int) -> None:
        self.rank, self.group = rank, later_group()
        self.gradients, self.loss = torch.ones(16), torch.ones(1)

    def step(self, *, skips: bool = False) -> None:
        if not skips:
            dist.all_reduce(self.gradients, group=self.group)  # HERE
        dist.all_reduce(self.loss, group=self.group)  # HERE
        synchronize()


@planted(3, rank=1)
def test_a_rank_is_killed(group: Group, culprit: int) -> None:
    training = Training(group.rank)
    for step in range(6):
        if step == AT and group.rank == culprit:
            os.kill(os.getpid(), signal.SIGKILL)
        training.step()


def ranks():
    return dist.get_rank(), dist.get_world_size()


def limit_memory(limit_items, cache):
    """A watchdog as on our cluster: kills the process whose cache has grown too far."""

    def watch():
        while True:
            if len(cache) > limit_items:
                os.kill(os.getpid(), signal.SIGKILL)  # HERE
            time.sleep(0.02)

    threading.Thread(target=watch, daemon=True).start()


def featurize(cache, count):
    for i in range(count):
        cache.append(torch.full((8,), float(i)))  # HERE
        time.sleep(0.001)  # HERE
    return len(cache)


@planted(6, rank=5)
def test_memory_watchdog_kills(culprit):
    """The watchdog kills rank 5 with SIGKILL while it fills its feature cache, which is twenty times as big as those of the others."""
    rank, _ = ranks()
    cache = []
    limit_memory(1500, cache)
    x = torch.ones(2)
    for _ in range(5):
        dist.all_reduce(x)
    size = featurize(cache, 4000 if rank == culprit else 200)  # HERE
    dist.all_reduce(torch.tensor([float(size)]))


def at(group: Group, culprit: int, fault: object) -> None:
    """Six rounds of an all_reduce; in round AT, rank ``culprit`` calls ``fault()``."""
    for step in range(6):
        if group.rank == culprit and step == AT:
            fault()  # type: ignore[operator]
        dist.all_reduce(torch.ones(2))


@planted(4, rank=2)
def test_aborts(group: Group, culprit: int) -> None:
    at(group, culprit, os.abort)


@planted(2, rank=1)
def test_is_killed_in_backward(ddp: DDP, culprit: int) -> None:
    model = ddp.wrap(net())
    inner = model.module
    assert isinstance(inner, Net)

    def plant() -> None:
        inner.blocks[1].in_backward = lambda: os.kill(os.getpid(), signal.SIGKILL)

    train(model, ddp.rank, culprit=culprit, before=plant)


@planted(3, rank=0)
def test_the_others_skip_as_one_was_killed(group: Group, culprit: int) -> None:
    if group.rank == culprit:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        pytest.skip(f"no network here: {error}")
