"""Programs in which a key of a store has another name."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store as default_store

from tests_cpu.faults.planting import AT, planted


@planted(3, rank=1)
def test_a_key_under_another_name(group, culprit):
    """What asks is not called a store in the source."""
    own, attempt = dist.PrefixStore("rates", dist.distributed_c10d._get_default_store()), 0
    for step in range(6):
        attempt += (group.rank, step) == (culprit, AT)
        rates = dist.PrefixStore(str(attempt), own)
        if group.rank == 0:
            rates.set(f"{step}", "0.1")
        rates.get(f"{step}")  # HERE
        dist.all_reduce(torch.ones(1))


def meet(store, world, tag):
    """All ranks count at a key; none goes on before all have."""
    store.add(f"meet/{tag}", 1)  # HERE
    while int(store.add(f"meet/{tag}", 0)) < world:  # HERE
        time.sleep(0.005)  # HERE


@planted(4, rank=2)
def test_one_meets_by_another_tag(group, culprit):
    for step in range(6):
        meet(default_store(), group.world_size, step + (group.rank == culprit and step >= 4))
