"""Programs in which two calls or messages change places."""

from __future__ import annotations

import threading
import time

import torch
import torch.distributed as dist
from torch import nn

from pytest_nsa.fixtures import Group
from tests_cpu.faults.planting import AT, planted


@planted(4, rank=2)
def test_groups_by_the_order_of_a_set(group, culprit):
    members = {"pairs": [0, 1], "ends": [0, 3], "middle": [1, 2]}
    names = sorted(members) if group.rank == culprit else list(members)
    groups = {name: dist.new_group(members[name]) for name in names}  # HERE
    for name, own in groups.items():
        if group.rank in members[name]:
            dist.all_reduce(torch.ones(1), group=own)


@planted(3)
def test_neighbours_make_groups_in_a_circle(group, faulty):
    own = [sorted((group.rank, other)) for other in ((group.rank + 1) % 3, (group.rank - 1) % 3)]
    for members in own if faulty else [[0, 1], [0, 2], [1, 2]]:
        pair = dist.new_group(members, use_local_synchronization=faulty)  # HERE
        if group.rank in members:
            dist.all_reduce(torch.ones(1), group=pair)


@planted(2, rank=0)
def test_two_groups_in_opposite_order(group: Group, culprit: int) -> None:
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    for chosen in (second, first) if group.rank == culprit else (first, second):
        dist.all_reduce(torch.ones(1), group=chosen)


@planted(2, rank=0)
def test_collectives_in_gradient_hooks_in_another_order(group: Group, culprit: int) -> None:
    first, second = torch.ones(3, requires_grad=True), torch.ones(5, requires_grad=True)
    for x in (first, second):
        x.register_hook(lambda gradient: dist.all_reduce(gradient))
    total = second.sum() + first.sum() if group.rank == culprit else first.sum() + second.sum()
    total.backward()


@planted(4)
def test_two_of_four_receive_from_each_other(group: Group, faulty: bool) -> None:
    if group.rank in (1, 2):
        works = [] if faulty else [dist.isend(torch.ones(2), 3 - group.rank)]
        dist.recv(torch.ones(2), 3 - group.rank)
        for work in works:
            work.wait()
    dist.barrier()


@planted(3, rank=1)
def test_sizes_are_gathered_in_a_thread_and_one_comes_later(group, culprit):
    def save():
        time.sleep(0.8 if group.rank == culprit else 0)
        dist.all_reduce(torch.zeros(3, dtype=torch.int64))  # HERE

    thread = threading.Thread(target=save, daemon=True)
    for step in range(10):
        time.sleep(0.2)
        dist.all_reduce(torch.ones(48))  # HERE
        if step == 3:
            thread.start()
    thread.join()


class Warmed(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.top = nn.Linear(6, 16), nn.Linear(16, 3)
        self.base.requires_grad_(False)

    def forward(self, x):
        return self.top(self.base(x).relu())


@planted(3, rank=2)
def test_one_rank_trains_its_base_sooner(group, culprit):
    """Parameter by parameter, each of a size of its own: one that no round had is no call of a later round."""
    torch.manual_seed(1)
    model = Warmed()
    for step in range(7):
        model.base.requires_grad_(step >= (AT if group.rank == culprit else 6))  # HERE
        model.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)  # HERE
