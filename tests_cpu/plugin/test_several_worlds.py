"""Ranks of one test that meet in several worlds, or in groups that their members alone make: groups of one name that differ."""

from __future__ import annotations

import pytest

from pytest_nsa.testing import run_example

WORLDS = """
import datetime

pytestmark = pytest.mark.timeout(15)


def meet(path, rank, size):
    dist.init_process_group("gloo", store=dist.FileStore(str(path), size), rank=rank, world_size=size)


def group_with_numbers(path, rank, size, name="weights"):
    "As training and serving processes make one for weights."
    from torch.distributed.distributed_c10d import PrefixStore, _new_process_group_helper, _world

    store, limit = PrefixStore(name, dist.FileStore(str(path), size)), datetime.timedelta(seconds=60)
    made, _ = _new_process_group_helper(size, rank, [], "gloo", store, group_name=name, timeout=limit)
    _world.pg_group_ranks[made] = {i: i for i in range(size)}
    return made
"""
PAIRS = """
@world_size(4, group=None)
def test_pairs(tmp_path):
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
"""
MORE = """
@world_size(3)
def test_one_leaves(group, tmp_path):
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
def test_members_alone_make_a_group(group):
    if group.rank != 1:
        time.sleep(3 if group.rank == 2 else 0)
        side = dist.new_group([0, 2], use_local_synchronization=True)
        dist.all_reduce(torch.ones(1), group=side)
    dist.barrier()


@world_size(4)
def test_a_group_with_numbers(group, tmp_path):
    if group.rank % 2:
        side = group_with_numbers(tmp_path / "weights", group.rank // 2, 2)
        time.sleep(3 if group.rank == 1 else 0)
        dist.broadcast(torch.ones(3), 0, group=side)
    dist.barrier()
"""
KEPT = """
@pytest.mark.reuse
@pytest.mark.world_size(3)
class TestKept:
    side = None

    def test_makes_a_group(self, group):
        TestKept.side = dist.new_group([0, 2])
        dist.barrier()

    def test_uses_the_group(self, group):
        if group.rank != 1:
            time.sleep(1.5 * group.rank)
            dist.all_reduce(torch.ones(1), group=TestKept.side)
        dist.barrier()
"""
FAULTS = """
@world_size(4, group=None)
def test_a_message_in_the_second_pair(tmp_path):
    pair, rank = divmod(int(os.environ["RANK"]), 2)
    meet(tmp_path / str(pair), rank, 2)
    if pair and not rank:
        dist.recv(torch.empty(1), 1)
    dist.barrier()


@world_size(3)
def test_a_group_to_which_one_does_not_come(group, tmp_path):
    if group.rank == 2:
        group_with_numbers(tmp_path / "weights", 1, 2)
    dist.barrier()


@world_size(2)
def test_an_assertion_after_worlds_that_differ(group, tmp_path):
    dist.destroy_process_group()
    meet(tmp_path / str(group.rank), 0, 1)
    dist.barrier() if group.rank else dist.all_reduce(torch.ones(3))
    assert group.rank == 0
"""


def test_two_methods_that_backends_pair(pytester: pytest.Pytester) -> None:
    source = """
    @world_size(2)
    def test_gathers(group):
        if group.rank == 0:
            time.sleep(2.5)
            dist.all_gather([torch.empty(2), torch.empty(2)], torch.ones(2))
        else:
            dist.all_gather_into_tensor(torch.empty(4), torch.ones(2))
    """
    result = run_example(pytester, source)
    assert result.outcomes["passed"] == 1
    assert "cannot resolve itself" not in result.stdout


def test_pairs_that_do_different_things(pytester: pytest.Pytester) -> None:
    assert run_example(pytester, WORLDS + PAIRS).outcomes == {"passed": 1}


@pytest.mark.slow
def test_groups_of_equal_names(pytester: pytest.Pytester) -> None:
    result = run_example(pytester, WORLDS + MORE)
    assert result.outcomes == {"passed": 3}
    assert "collective" not in result.stdout, "at most a suspicion that a rank sleeps"


@pytest.mark.slow
def test_a_group_that_reused_ranks_have_kept(pytester: pytest.Pytester) -> None:
    result = run_example(pytester, WORLDS + KEPT, "-p", "no:randomly")
    assert result.outcomes == {"passed": 2}
    assert "collective" not in result.stdout


@pytest.mark.slow
def test_faults_in_other_worlds(pytester: pytest.Pytester) -> None:
    verdicts = run_example(pytester, WORLDS + FAULTS).verdicts
    message = verdicts["test_a_message_in_the_second_pair"]
    assert (message.cause, message.ranks) == ("p2p_unmatched", (3,)), "the job's number of the world's rank 1"
    group = verdicts["test_a_group_to_which_one_does_not_come"]
    assert (group.cause, group.ranks, group.certain) == ("init_timeout", (2,), False)
    assert "to which 1 of 2 have come" in group.reason
    failed = verdicts["test_an_assertion_after_worlds_that_differ"]
    assert (failed.outcome, failed.cause, failed.ranks) == ("FAIL", "assertion", (1,))
