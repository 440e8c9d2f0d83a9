"""Messages, and groups of one name that differ: ranks of one test that meet in several worlds, or in groups that few make."""

# options: -o timeout=15 -p xdist -n 3
import os
import time

import pytest
import torch
import torch.distributed as dist

from pytest_nsa import world_size


def meet(path, rank, size):
    dist.init_process_group("gloo", store=dist.FileStore(str(path), size), rank=rank, world_size=size)


@world_size(3)
def test_a_ring_of_odd_length(group):  # -> p2p_unmatched ?: messages of two groups do not meet
    there, back = dist.new_group(), dist.new_group()
    following, previous = (group.rank + 1) % 3, (group.rank - 1) % 3
    for _turn in range(2):
        if group.rank % 2 == 0:
            dist.send(torch.ones(5), following, group=there)
            dist.recv(torch.ones(5), previous, group=back)
        else:
            dist.recv(torch.ones(5), previous, group=there)
            dist.send(torch.ones(5), following, group=back)


@world_size(2)
def test_an_answer_in_the_group_of_questions(group):  # -> p2p_unmatched ?: messages of two groups do not meet
    questions, answers = dist.new_group(), dist.new_group()
    for step in range(4):
        if group.rank == 0:
            dist.send(torch.ones(2), 1, group=questions)
            dist.recv(torch.ones(2), 1, group=answers)
        else:
            dist.recv(torch.ones(2), 0, group=questions)
            dist.send(torch.ones(2), 0, group=questions if step == 2 else answers)


@world_size(2)
def test_a_receive_without_a_send(group):  # -> p2p_unmatched ? uncertain here
    if group.rank == 0:
        dist.recv(torch.ones(1), src=1)  # HERE


@world_size(2)
def test_both_receive(group):  # -> p2p_unmatched 0,1
    dist.recv(torch.ones(1), 1 - group.rank)


@world_size(4)
def test_one_send_less_of_an_actor(group):  # -> p2p_unmatched 2
    for step in range(5):
        if group.rank == 0:
            for actor in range(1, 4):
                for _ in range(3):
                    dist.recv(torch.empty(7), actor)
        else:
            for i in range(3):
                if (group.rank, step, i) != (2, 1, 1):
                    dist.send(torch.ones(7), 0)
        for size in (2, 3):
            dist.broadcast(torch.ones(size), 0)


@world_size(2)
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


@world_size(2)
def test_an_assertion_after_worlds_that_differ(group, tmp_path):  # -> assertion 1
    dist.destroy_process_group()
    meet(tmp_path / str(group.rank), 0, 1)
    if group.rank:
        dist.barrier()
    else:
        dist.all_reduce(torch.ones(3))
    assert group.rank == 0


@pytest.mark.parametrize("number", [1, 2])  # the second is forked ahead: its group is made before it knows its test
@world_size(2)
def test_groups_in_another_order(group, number):  # -> group_order_deadlock ?
    groups = dist.new_group(), dist.new_group()
    dist.barrier(groups[group.rank])
