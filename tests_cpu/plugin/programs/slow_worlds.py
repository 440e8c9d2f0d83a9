"""More groups of one name, and a default group that is made again."""

# slow
# options: -o timeout=15 -p no:randomly
import datetime
import time

import torch
import torch.distributed as dist

from pytest_nsa import reuse, world_size


def meet(path, rank, size, seconds=60):
    limit = datetime.timedelta(seconds=seconds)
    store = dist.FileStore(str(path), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)


def group_with_numbers(path, rank, size, name="weights"):
    """As training and serving processes make one for weights."""
    from torch.distributed.distributed_c10d import PrefixStore, _new_process_group_helper, _world

    store, limit = PrefixStore(name, dist.FileStore(str(path), size)), datetime.timedelta(seconds=60)
    made, _ = _new_process_group_helper(size, rank, [], "gloo", store, group_name=name, timeout=limit)
    _world.pg_group_ranks[made] = {i: i for i in range(size)}
    return made


@world_size(3)
def test_one_leaves(group, tmp_path):  # -> passes
    dist.barrier()
    dist.destroy_process_group()
    if group.rank:
        meet(tmp_path / "rest", group.rank - 1, 2)
        dist.broadcast(torch.ones(2), 0)
        time.sleep(3 if group.rank == 2 else 0)
        dist.barrier()
    else:
        meet(tmp_path / "alone", 0, 1)
        dist.all_reduce(torch.ones(5))
        time.sleep(3)


@world_size(3)
def test_members_alone_make_a_group(group):  # -> passes
    if group.rank != 1:
        time.sleep(3 if group.rank == 2 else 0)
        side = dist.new_group([0, 2], use_local_synchronization=True)
        dist.all_reduce(torch.ones(1), group=side)
    dist.barrier()


@world_size(4)
def test_a_group_with_numbers(group, tmp_path):  # -> passes
    if group.rank % 2:
        side = group_with_numbers(tmp_path / "weights", group.rank // 2, 2)
        time.sleep(3 if group.rank == 1 else 0)
        dist.broadcast(torch.ones(3), 0, group=side)
    dist.barrier()


@world_size(3)
def test_a_group_to_which_one_does_not_come(group, tmp_path):  # -> init_timeout 2 uncertain: to which 1 of 2 have come
    if group.rank == 2:
        group_with_numbers(tmp_path / "weights", 1, 2)
    dist.barrier()


@reuse
@world_size(3)
class TestKept:
    side = None

    def test_makes_a_group(self, group):  # -> passes
        TestKept.side = dist.new_group([0, 2])
        dist.barrier()

    def test_uses_the_group(self, group):  # -> passes
        if group.rank != 1:
            time.sleep(1.5 * group.rank)
            dist.all_reduce(torch.ones(1), group=TestKept.side)
        dist.barrier()


def test_a_message_of_a_gigabyte(group):  # -> passes
    mine, theirs = torch.ones(300_000_000), torch.empty(300_000_000)
    for work in [dist.isend(mine, 1 - group.rank), dist.irecv(theirs, 1 - group.rank)]:
        work.wait()
