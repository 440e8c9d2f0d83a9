"""Groups of one name that differ: ranks of one test that meet in several worlds, or in groups of which only some are members."""

# options: -o timeout=15 -p xdist -n 3
import os
import time

import pytest
import torch
import torch.distributed as dist

from pytest_nsa import world_size


def meet(path, rank, size):
    dist.init_process_group("gloo", store=dist.FileStore(str(path), size), rank=rank, world_size=size)


def test_two_methods_that_backends_pair(group):  # -> passes
    if group.rank == 0:
        time.sleep(2.5)
        dist.all_gather([torch.empty(2), torch.empty(2)], torch.ones(2))
    else:
        dist.all_gather_into_tensor(torch.empty(4), torch.ones(2))


@world_size(4, group=None)
def test_pairs_that_do_different_things(tmp_path):  # -> passes
    pair, rank = divmod(int(os.environ["RANK"]), 2)
    meet(tmp_path / str(pair), rank, 2)
    if pair == 0:
        for _ in range(3):
            dist.all_reduce(torch.ones(4))
        time.sleep(3 - 3 * rank)
        dist.barrier()
    else:
        dist.broadcast(torch.ones(2), 0)
        time.sleep(2 * rank)
        dist.all_gather([torch.empty(1)] * 2, torch.ones(1))


@world_size(4, group=None)
def test_a_message_in_the_second_pair(tmp_path):  # -> p2p_unmatched 3
    pair, rank = divmod(int(os.environ["RANK"]), 2)
    meet(tmp_path / str(pair), rank, 2)
    if pair and not rank:
        dist.recv(torch.empty(1), 1)
    dist.barrier()


@pytest.mark.parametrize("number", [1, 2])  # the second is forked ahead: its group is made before it knows its test
def test_groups_in_another_order(group, number):  # -> group_order_deadlock ?
    groups = dist.new_group(), dist.new_group()
    dist.barrier(groups[group.rank])


@world_size(3)
def test_a_stage_fails_before_it_sends(group):  # -> rank_exception 1 here
    for step in range(4):
        x = torch.ones(4)
        if group.rank:
            dist.recv(x, group.rank - 1)
        if (group.rank, step) == (1, 2):
            x.view(3)  # HERE
        if group.rank < 2:
            dist.send(x, group.rank + 1)
