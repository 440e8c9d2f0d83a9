"""Programs in which a call or message is added."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store as default_store
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from pytest_nsa.fixtures import Group
from tests_cpu.faults.planting import AT, planted
from tests_cpu.faults.replicas import labelled_batch, small


def rounds(group: Group, culprit: int, fault: str) -> None:
    """Six rounds of two collectives; rank ``culprit`` does otherwise in round AT."""
    total, many = torch.ones(4), [torch.zeros(2) for _ in range(group.world_size)]
    for step in range(6):
        is_it = group.rank == culprit and step == AT
        if is_it and fault == "extra":
            dist.barrier()
        if is_it and fault == "swapped":
            dist.all_gather(many, torch.ones(2))
            dist.all_reduce(total)
            continue
        if is_it and fault == "operation":
            dist.broadcast(total, 0)
        elif not (is_it and fault == "skipped"):
            dist.all_reduce(total)
        dist.all_gather(many, torch.ones(2))


def studied(objective: Callable[[], None], rounds: int) -> None:
    for _ in range(rounds):
        objective()


def suggested(value: int) -> int:
    given = [value]
    dist.broadcast_object_list(given, src=0)  # HERE
    return given[0]


@planted(3, rank=2)
def test_a_study_that_rank_0_leads(group: Group, culprit: int) -> None:
    """Rank 0 comes to the objective by other lines than the others, of which one asks for a value more."""

    def objective() -> None:
        if suggested(16) * 2 > (20 if group.rank == culprit else 40):
            suggested(4)  # HERE
        for _ in range(4):
            dist.all_reduce(torch.ones(3))

    if group.rank == 0:
        studied(objective, rounds=4)
    else:
        for _ in range(4):
            objective()


@planted(3, rank=0)
def test_an_extra_reduction_before_a_group_of_all(group, culprit):
    for _ in range(3):
        loss = torch.ones(3)
        dist.all_reduce(loss)
    if group.rank == culprit:
        dist.all_reduce(loss)  # HERE
    everybody = dist.new_group()
    dist.all_reduce(torch.ones(1), group=everybody)


class Tied(nn.Module):
    """The last layer has the first one's weight: a state has it twice, the parameters once."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x))


@planted(4, rank=0)
def test_weights_are_sent_once_more_than_they_are_taken(group, culprit):
    """The one that trains has made steps, and the others never do: that tells nothing about who is ahead."""
    torch.manual_seed(1)
    model, listeners = Tied(), dist.new_group([0, 1, 2])
    if group.rank == culprit:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.arange(6)).square().mean().backward()
            optimizer.step()
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, 0, group=listeners)  # HERE
    elif group.rank < 3:
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0, group=listeners)  # HERE
    dist.all_reduce(torch.ones(3))


@planted(3, rank=2)
def test_a_worker_waits_for_a_job_that_it_did_not_ask_for(group, culprit):
    """The first rank takes requests from anybody."""
    if group.rank == 0:
        for _ in range(8):
            dist.send(torch.ones(1), dist.recv(torch.empty(1)))
    else:
        for job in range(4):
            if (group.rank, job) != (culprit, 2):
                dist.send(torch.ones(1), 0)  # HERE
            dist.recv(torch.empty(1), 0)
    dist.barrier()


class Worker:
    """Hands gradients to a server by keys, and waits for the weights of its version."""

    def __init__(self, store, rank, version=0):
        self.store, self.rank, self.version = store, rank, version

    def step(self):
        self.store.set(f"gradient/{self.rank}/{self.version}", "1")  # HERE
        wait_for(self.store, f"weights/{self.version}")
        self.version += 1


def wait_for(store, key):
    while not store.check([key]):
        time.sleep(0.02)


@planted(3, rank=1)
def test_a_worker_counts_one_version_too_many(group, culprit):
    store = default_store()
    if group.rank == 0:
        for version in range(8):
            for rank in (1, 2):
                wait_for(store, f"gradient/{rank}/{version}")
                store.delete_key(f"gradient/{rank}/{version}")
            store.set(f"weights/{version}", "1")
        return
    worker = Worker(store, group.rank)
    for step in range(8):
        if (group.rank, step) == (culprit, 4):
            worker = Worker(store, group.rank, step + 1)
        worker.step()


@planted(3, rank=0)
def test_an_evaluation_through_the_wrapper_on_one_rank(group, culprit):
    """What DDP broadcasts before a forward is counted apart from the others' call, over which gloo ends them."""
    model = DDP(nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8)))
    for _ in range(3):
        for _ in range(3):
            model(torch.randn(4, 5)).sum().backward()
        if group.rank == culprit:
            with torch.no_grad():
                model(torch.randn(16, 5))  # HERE
        dist.broadcast(torch.zeros(4), 0)


def where():
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def evaluate_remainder(model, batches, world):
    outputs = []
    for batch in batches:
        mine = model(batch).detach()
        parts = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(parts, mine)  # HERE
        outputs += parts
    return torch.cat(outputs).mean()


@planted(3)
def test_eval_remainder_to_last(faulty):
    """The remainder of the evaluation set goes to the last rank, which gathers one batch more than the others do."""
    rank, world = where()
    torch.manual_seed(0)
    data, model = torch.randn(28 if faulty else 24, 8), nn.Linear(8, 2)
    each = len(data) // (world * 4) * 4
    mine = data[rank * each : (rank + 1) * each] if rank < world - 1 else data[rank * each :]
    for epoch in range(2):
        evaluate_remainder(model, mine.split(4), world)  # HERE
        dist.barrier()  # HERE


def save(state, rank):
    if rank == 0:  # HERE
        state.clear()
        dist.barrier()  # HERE


@planted(2)
def test_a_barrier_in_the_first_rank_s_branch(group, faulty):
    model = DDP(small(), broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        x, y = labelled_batch(group.rank, step)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if step == AT and faulty:
            save({}, group.rank)  # HERE


def write_shards() -> None:
    dist.barrier()  # HERE


def link_latest() -> None:
    dist.barrier()


@planted(3, rank=0)
def test_only_the_first_rank_calls_a_save_that_meets_the_others(group, culprit):
    """Its barrier is paired with the others' next one: the call that it makes too much is not the one in which it waits."""
    for _ in range(4):
        dist.all_reduce(torch.ones(2))
    if group.rank == culprit:
        write_shards()
    link_latest()
