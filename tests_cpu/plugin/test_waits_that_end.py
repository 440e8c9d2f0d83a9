"""Ranks that wait for one that comes late, in ways that look like a deadlock on the board: no test is ended."""

from __future__ import annotations

import pytest

from pytest_nsa.testing import run_example

LATE = """
import datetime

import torch.distributed._functional_collectives as functional

pytestmark = pytest.mark.timeout(15)


@world_size(2)
def test_backs_off_after_a_timeout(group):
    short = dist.new_group(timeout=datetime.timedelta(seconds=1))
    if group.rank == 0:
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1), group=short)
        time.sleep(3)
    dist.barrier()


@world_size(2)
@pytest.mark.parametrize("how", ["_set_pg_timeout", "set_timeout"])
def test_expects_a_timeout_that_it_has_set(group, how):
    set_limit = getattr(dist.distributed_c10d, how, None)  # torch 2.15 has the second
    if set_limit is None:
        pytest.skip("another version of torch")
    if not hasattr(dist.ProcessGroup, "set_timeout"):
        pytest.skip("gloo of torch 2.6 keeps the time limit with which its group was made")
    set_limit(datetime.timedelta(seconds=4))
    with pytest.raises(RuntimeError):
        dist.broadcast(torch.ones(1), 1 - group.rank)


@world_size(2)
def test_functional_by_name_and_not(group):
    time.sleep(2.5 * group.rank)
    if group.rank:
        dist.all_reduce(torch.ones(2))
    else:
        functional.wait_tensor(functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD.group_name))
"""
MORE = """
@world_size(3)
def test_functional_in_a_group(group):
    side = dist.new_group([0, 2])
    if group.rank != 1:
        time.sleep(1.5 * group.rank)
        functional.wait_tensor(functional.all_reduce(torch.ones(2), "sum", side.group_name))
    dist.barrier()


@world_size(2)
def test_sleeps_for_as_long_as_a_tensor_says(group):
    delay, side = torch.tensor(3.0), dist.new_group()
    if group.rank == 0:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        time.sleep(delay.item())
        dist.barrier(side)
        work.wait()
    else:
        dist.barrier(side)
        dist.all_reduce(torch.ones(1))


@world_size(2)
def test_expects_a_timeout_of_a_functional_collective(group):
    short = dist.new_group(timeout=datetime.timedelta(seconds=3))
    if group.rank == 0:
        with pytest.raises(RuntimeError):
            functional.wait_tensor(functional.all_reduce(torch.ones(1), "sum", short))
    dist.barrier()
"""
AGAIN = """
@world_size(2, group=None)
@pytest.mark.parametrize("fails", [False, True])
def test_meets_again(tmp_path, fails):
    rank = int(os.environ["RANK"])
    for number in range(2):
        store = dist.FileStore(str(tmp_path / str(number)), 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=2 + 9 * number))
        if number == 0 and rank == 0:
            with pytest.raises(RuntimeError):
                dist.all_reduce(torch.ones(1))
        elif number == 0:
            time.sleep(2.5)
        else:
            dist.barrier()
            time.sleep(2.5 * rank)
            dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
    assert not (fails and rank)
"""
LARGE = """
@world_size(2)
def test_exchange(group):
    mine, theirs = torch.ones(300_000_000), torch.empty(300_000_000)
    for work in [dist.isend(mine, 1 - group.rank), dist.irecv(theirs, 1 - group.rank)]:
        work.wait()
"""
SWAPPED = """
@pytest.mark.parametrize("number", [1, 2])
@world_size(2)
def test_order(group, number):
    groups = dist.new_group(), dist.new_group()
    dist.barrier(groups[group.rank])
"""


def test_after_a_caught_timeout_and_by_functional_collectives(pytester: pytest.Pytester) -> None:
    result = run_example(pytester, LATE)
    assert result.outcomes["passed"] + result.outcomes.get("skipped", 0) == 4
    assert "cannot resolve itself" not in result.stdout


@pytest.mark.slow
def test_more_waits_that_end(pytester: pytest.Pytester) -> None:
    result = run_example(pytester, LATE + MORE)
    assert result.outcomes["passed"] in (6, 7)
    assert "cannot resolve itself" not in result.stdout


@pytest.mark.slow
def test_a_default_group_that_is_made_again(pytester: pytest.Pytester) -> None:
    """One rank has made a call more in the first, which ended by its time limit."""
    result = run_example(pytester, "import datetime\n" + AGAIN)
    assert result.outcomes == {"passed": 1, "failed": 1}
    assert (result.verdicts["test_meets_again[True]"].cause, result.verdicts["test_meets_again[True]"].ranks) == (
        "assertion", (1,),
    )  # fmt: skip


@pytest.mark.slow
def test_a_message_that_takes_seconds(pytester: pytest.Pytester) -> None:
    """Of 1.2 GB: each rank waits for its send, and has begun its receive."""
    assert run_example(pytester, LARGE).outcomes == {"passed": 1}


def test_ranks_that_were_forked_ahead_have_the_job_s_groups(pytester: pytest.Pytester) -> None:
    """Their default group is made before they know their test."""
    verdicts = run_example(pytester, SWAPPED).verdicts
    assert {(v.cause, v.duration_s < 10) for v in verdicts.values()} == {("group_order_deadlock", True)}
    assert len(verdicts) == 2
