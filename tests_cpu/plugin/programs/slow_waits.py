"""More ranks that wait for one that comes late, and a rank at work that misses a time limit."""

# slow
# options: -o timeout=60
import datetime
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from pytest_nsa import world_size

SHORT = datetime.timedelta(seconds=2.5)


def compute(seconds):
    x, end = torch.ones(64, 64), time.monotonic() + seconds
    while time.monotonic() < end:
        x = x @ x / 64


@world_size(3)
def test_functional_in_a_group(group):  # -> passes
    side = dist.new_group([0, 2])
    if group.rank != 1:
        time.sleep(1.5 * group.rank)
        functional.wait_tensor(functional.all_reduce(torch.ones(2), "sum", side.group_name))
    dist.barrier()


def test_sleeps_for_as_long_as_a_tensor_says(group):  # -> passes
    delay, side = torch.tensor(3.0), dist.new_group()
    if group.rank == 0:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        time.sleep(delay.item())
        dist.barrier(side)
        work.wait()
    else:
        dist.barrier(side)
        dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize("what", ["functional", "monitored_barrier", "recv", "store"])
def test_expects_a_limit(group, what):  # -> passes
    short = dist.new_group(timeout=SHORT)
    waits = {
        "functional": lambda: functional.wait_tensor(functional.all_reduce(torch.ones(1), "sum", short)),
        "monitored_barrier": lambda: dist.monitored_barrier(timeout=SHORT),
        "recv": lambda: dist.recv(torch.ones(2), 1, group=short),
        "store": lambda: dist.distributed_c10d._get_default_store().wait(["never"], SHORT),
    }
    if group.rank == 0:
        time.sleep(0.5)  # the other rank has ended by now
        with pytest.raises(RuntimeError):
            waits[what]()


def test_pauses_twice_at_one_place(group):  # -> passes
    for _ in range(2):
        time.sleep(4.5 * group.rank)
        dist.barrier()


@world_size(3)
def test_loads(group):  # -> SLOW straggler 2
    dist.barrier()
    compute(9 if group.rank == 2 else 0)  # longer than the host waits for the others of a rank that failed
    try:
        dist.monitored_barrier(timeout=datetime.timedelta(seconds=1), wait_all_ranks=True)
    except RuntimeError:
        raise ValueError("other ranks did not load") from None
