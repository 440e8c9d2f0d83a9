"""Ranks that wait for one that comes late, or for a time limit that the test expects: no such test is ended or announced."""

# options: -o timeout=30
import subprocess
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

SHORT = timedelta(seconds=2.5)


def times_out():
    return pytest.raises(RuntimeError, match=r"(?i)(timed|time) ?out|rank 1 failed to pass")


def test_backs_off_after_a_time_limit(group):  # -> passes
    short = dist.new_group(timeout=timedelta(seconds=1))
    if group.rank == 0:
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1), group=short)
        time.sleep(3)
    dist.barrier()


def test_expects_the_limit_of_a_wait(group):  # -> passes
    if group.rank == 0:
        time.sleep(0.5)  # the other rank has ended by now
        with times_out():
            dist.all_reduce(torch.ones(2), async_op=True).wait(SHORT)


@pytest.mark.parametrize("how", ["_set_pg_timeout", "set_timeout"])
def test_expects_a_limit_that_it_has_set(group, how):  # -> passes or skips
    set_limit = getattr(dist.distributed_c10d, how, None)  # torch 2.15 has the second
    if set_limit is None:
        pytest.skip("another version of torch")
    if not hasattr(dist.ProcessGroup, "set_timeout"):
        pytest.skip("gloo of torch 2.6 keeps the time limit with which its group was made")
    set_limit(timedelta(seconds=4))
    with pytest.raises(RuntimeError):
        dist.broadcast(torch.ones(1), 1 - group.rank)


def test_functional_by_name_and_not(group):  # -> passes
    time.sleep(2.5 * group.rank)
    if group.rank:
        dist.all_reduce(torch.ones(2))
    else:
        functional.wait_tensor(functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD.group_name))


def test_joins_a_thread_for_a_time(group):  # -> passes
    if group.rank == 0:
        dist.recv(torch.empty(1), src=1)
        dist.send(torch.ones(1), dst=1)
        return
    thread = threading.Thread(target=dist.recv, args=(torch.empty(1),), kwargs={"src": 0})
    thread.start()
    thread.join(timeout=5)
    dist.send(torch.ones(1), dst=0)
    thread.join()


def test_waits_for_a_child_for_a_time(group):  # -> passes
    if group.rank == 1:
        with pytest.raises(subprocess.TimeoutExpired):
            subprocess.run(["sleep", "60"], timeout=5)
    dist.barrier()
