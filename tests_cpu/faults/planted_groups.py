"""Planted: groups, roots, peers and sizes that differ between ranks."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pytest_nsa.fixtures import Group
from tests_cpu.faults.planting import planted


@planted("skipped_collective", [2], n=4)
def test_a_cached_configuration_is_not_broadcast(group: Group, tmp_path: Path) -> None:
    cache = tmp_path / f"config-{group.rank}.json"
    if group.rank == 2:
        cache.write_text("{}")
    for _ in range(3):
        dist.all_reduce(torch.ones(4))
    configuration: list[Any] = [{"lr": 1}]
    if not cache.exists():
        dist.broadcast_object_list(configuration, src=0)
    dist.barrier()


@planted("group_order_deadlock", [2], n=3)
def test_a_pair_and_all_in_another_order(group: Group) -> None:
    pair = dist.new_group([0, 2])
    if group.rank == 2:
        dist.all_reduce(torch.ones(3), group=pair)
        dist.all_reduce(torch.ones(3))
    else:
        dist.all_reduce(torch.ones(3))
        if group.rank == 0:
            dist.all_reduce(torch.ones(3), group=pair)


def of_the_pair(pair: Any) -> None:
    dist.all_reduce(torch.ones(3), group=pair)


def of_all() -> None:
    dist.barrier()


@planted("group_order_deadlock", [1], n=4, miss="the order of two functions")
def test_a_pair_and_all_in_functions_of_their_own(group: Group) -> None:
    pair = dist.new_group([1, 2])
    calls = [of_all, *([functools.partial(of_the_pair, pair)] if group.rank in (1, 2) else [])]
    if group.rank == 1:
        calls.reverse()
    for call in calls:
        call()


@planted("extra_collective", [2], n=4, where="test_planted.py")
def test_the_group_is_forgotten_once(group: Group) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[group.rank // 2]
    dist.all_reduce(torch.ones(3), group=mine)
    if group.rank == 2:
        dist.all_reduce(torch.ones(3))
    else:
        dist.all_reduce(torch.ones(3), group=mine)
    dist.barrier()


@planted("p2p_unmatched", [2], n=4, reason="to rank 0")
def test_a_stage_sends_to_the_wrong_peer(group: Group) -> None:
    rank = group.rank
    for micro in range(3):
        x = torch.full((4,), float(micro))
        if rank > 0:
            dist.recv(x, src=rank - 1)
        if rank < 3:
            dist.send(x + 1, dst=0 if (rank, micro) == (2, 1) else rank + 1)


@planted("collective_mismatch", [0, 1], reason="from rank 1")
def test_everybody_broadcasts_its_own(group: Group) -> None:
    seed = torch.tensor([group.rank + 17.0])
    dist.broadcast(seed, src=dist.get_rank())
    found = [torch.zeros(1), torch.zeros(1)]
    dist.all_gather(found, seed)
    assert found[0].item() == found[1].item()


@planted("collective_mismatch", [1], n=3)
def test_scatters_from_another_rank(group: Group) -> None:
    src = 1 if group.rank == 1 else 0
    shards = [{"shard": i, "pad": "x" * 50 * i} for i in range(3)]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, shards if group.rank == src else None, src=src)
    dist.barrier()
    assert mine[0]["shard"] == group.rank


@planted("collective_mismatch", [2], n=3, reason="max")
def test_reduces_by_another_operation(group: Group) -> None:
    t = torch.ones(4)
    dist.all_reduce(t, dist.ReduceOp.MAX if group.rank == 2 else dist.ReduceOp.SUM)
    assert t.tolist() == [3.0] * 4


@planted("collective_mismatch", [2], n=3, reason="rank 2 gives 2 to rank 0, which takes 1")
def test_sends_more_to_one_than_it_takes(group: Group) -> None:
    given = [2, 1, 1] if group.rank == 2 else [1, 1, 1]
    taken = torch.zeros(3, 2)
    dist.all_to_all_single(taken, torch.ones(sum(given), 2), [1, 1, 1], given)
    dist.barrier()


@planted("group_order_deadlock", [2], n=4)
def test_a_pair_and_all_change_places_in_a_round(group: Group) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]

    def of_mine() -> None:
        dist.all_reduce(torch.ones(4), group=pairs[group.rank // 2])

    def norm() -> None:
        dist.all_reduce(torch.ones(1))

    for step in range(3):
        calls = (norm, of_mine) if (group.rank, step) == (2, 2) else (of_mine, norm)
        for call in calls:
            call()


@planted("data_dependent_branch", [1], n=3, reason="old fabric")
def test_expected_to_fail_on_one_rank(group: Group) -> None:
    dist.all_reduce(torch.ones(1))
    if group.rank == 1:
        pytest.xfail("this host has an old fabric")
    dist.all_reduce(torch.ones(1))


@planted("skipped_collective", [1], n=4, where="test_planted.py")
def test_a_call_of_a_pair_is_skipped(group: Group) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    if group.rank != 1:
        dist.all_reduce(torch.ones(2), group=pairs[group.rank // 2])
    dist.barrier()
