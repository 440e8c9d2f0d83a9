"""Programs in which a call has another operation, size, type or tag."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from pytest_nsa.fixtures import Group
from tests_cpu.faults.planting import AT, planted


@planted(2)
def test_everybody_broadcasts_its_own(group: Group, faulty: bool) -> None:
    seed = torch.tensor([group.rank + 17.0])
    dist.broadcast(seed, src=dist.get_rank() if faulty else 0)
    found = [torch.zeros(1), torch.zeros(1)]
    dist.all_gather(found, seed)
    assert found[0].item() == found[1].item()


@planted(3, rank=1)
def test_sends_more_than_is_taken(group: Group, culprit: int, more: list[int] = [2, 1, 2]) -> None:
    given = more if group.rank == culprit else [1, 1, 1]
    taken = torch.zeros(3, 2)
    dist.all_to_all_single(taken, torch.ones(sum(given), 2), [1, 1, 1], given)
    dist.barrier()


def rounds(group: Group, culprit: int, fault: str) -> None:
    """Six rounds of two collectives; rank ``culprit`` does otherwise in round AT."""
    total, many = torch.ones(4), [torch.zeros(2) for _ in range(group.world_size)]
    for step in range(6):
        is_it = group.rank == culprit and step == AT
        if is_it and fault == "shape":
            dist.all_reduce(torch.ones(5))
        elif is_it and fault == "dtype":
            dist.all_reduce(torch.ones(4, dtype=torch.float64))
        elif is_it and fault == "dtype of equal size":
            dist.all_reduce(torch.ones(4, dtype=torch.int32))
        else:
            dist.all_reduce(total)
        dist.all_gather(many, torch.ones(2))


@planted(2, rank=1)
def test_other_payload(group: Group, culprit: int, fault: str = "dtype of equal size") -> None:
    rounds(group, culprit, fault)


@planted(3, rank=0)
def test_one_rank_takes_the_largest_in_a_reduce_scatter(group, culprit):
    out, op = torch.empty(2), dist.ReduceOp.MAX if group.rank == culprit else dist.ReduceOp.SUM
    dist.reduce_scatter_tensor(out, torch.ones(6), op=op)  # HERE


@planted(3, rank=2)
def test_an_exchange_of_all_with_another_type(group, culprit):
    kind = torch.float64 if group.rank == culprit else torch.int64
    out = torch.empty(3, dtype=kind)
    dist.all_to_all_single(out, torch.ones(3, dtype=kind))  # HERE


def exchange(rows, gives, takes):
    got = torch.zeros(sum(takes), 2)
    dist.all_to_all_single(got, rows[: sum(gives)], takes, gives)  # HERE


@planted(4, rank=3)
def test_other_rows_than_were_told(group, culprit):
    """Two ranks do not agree on a number of rows: what they told each other decides who is wrong."""
    for step in range(5):
        gives = torch.tensor([1 + (group.rank + peer + step) % 3 for peer in range(4)])
        takes = torch.empty_like(gives)
        dist.all_to_all_single(takes, gives)
        if (group.rank, step) == (culprit, 3):
            gives[2] += 1  # HERE
        exchange(torch.ones(20, 2), gives.tolist(), takes.tolist())


@planted(2)
def test_sizes_of_a_call_of_the_backend(group, faulty):
    """The backend's object is called, which no trace records: gloo aborts a rank, and the recorded calls agree."""
    dist.all_reduce(torch.ones(3))
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    backend.allreduce([torch.ones(4000 if faulty and group.rank else 4)]).wait()  # HERE


@planted(2, rank=1)
def test_a_message_into_another_type_in_one_round(group, culprit):
    for step in range(5):
        if group.rank == 0:
            dist.send(torch.ones(4), 1)
        else:
            kind = torch.int32 if (group.rank, step) == (culprit, AT) else torch.float32
            dist.recv(torch.empty(4, dtype=kind), 0)  # HERE


@planted(2, rank=1)
def test_positions_that_one_rank_does_not_shorten(group, culprit):
    """Both ranks receive as many bytes as the other's short numbers have."""
    positions = torch.arange(5)
    sent = dist.isend(positions if group.rank == culprit else positions.to(torch.int16), 1 - group.rank)  # HERE
    dist.recv(torch.empty(5, dtype=torch.int16), 1 - group.rank)
    sent.wait()


@planted(3, rank=1)
def test_one_rank_builds_its_layers_without_a_bias(group, culprit):
    style = "gpt" if group.rank == culprit else "llama"
    has_bias = style == "llama"
    DDP(nn.Sequential(nn.Linear(4, 4, bias=has_bias), nn.ReLU(), nn.Linear(4, 2, bias=has_bias)))  # HERE


@planted(2, rank=0)
def test_a_worker_gives_half_of_its_rows_in_one_round(group, culprit):
    for step in range(5):
        x = torch.ones(2 if group.rank == culprit and step == AT else 6)
        parts = [torch.empty(6) for _ in range(2)] if group.rank == 1 else None
        dist.gather(x, parts, dst=1)  # HERE
