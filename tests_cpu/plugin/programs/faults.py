"""Real faults in tests on ranks, between tests that pass."""

# options: -p xdist -n 3
import ctypes
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from pytest_nsa import world_size


class InBackward(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        x = x * 1
        x.register_hook(lambda gradient: self.function())
        return x


LOCK = threading.Lock()


def step(ddp, fault):
    plant = InBackward(fault if ddp.rank == 1 else lambda: None)
    model = ddp.wrap(torch.nn.Sequential(torch.nn.Linear(4, 4), plant, torch.nn.Linear(4, 4)))
    model(torch.ones(2, 4)).sum().backward()


@pytest.mark.timeout(6)
def test_lock_in_backward(ddp):  # -> HANG lock_deadlock 1 here
    LOCK.acquire()
    step(ddp, lambda: LOCK.acquire())  # HERE


@pytest.mark.timeout(6)
def test_python_loop(group):  # -> HANG infinite_loop 1 here
    if group.rank == 1:
        while True:  # HERE
            pass
    dist.barrier()


@pytest.mark.timeout(6)
def test_sleep(group):  # -> HANG sleeping 0 here
    if group.rank == 0:
        time.sleep(1000)  # HERE
    dist.barrier()


@pytest.mark.timeout(6)
def test_stopped(group):  # -> HANG rank_stopped 1
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()


@pytest.mark.timeout(60)
def test_killed(ddp):  # -> CRASH rank_died 1 certain: SIGKILL
    step(ddp, lambda: os.kill(os.getpid(), signal.SIGKILL))


@pytest.mark.timeout(60)
def test_segfault(group):  # -> CRASH rank_died 0 certain here: SIGSEGV
    if group.rank == 0:
        ctypes.string_at(0)  # HERE
    dist.barrier()


@pytest.mark.timeout(60)
def test_exits(group):  # -> FAIL rank_exited 1 certain
    if group.rank == 1:
        os._exit(0)
    dist.barrier()


@world_size(3)
@pytest.mark.timeout(60)
def test_raises(group):  # -> FAIL rank_exception 1 certain here
    if group.rank == 1:
        raise ValueError("first cause")  # HERE
    dist.barrier()


@world_size(3)
@pytest.mark.timeout(60)
def test_skips_collective(group):  # -> HANG skipped_collective 2 certain
    for step in range(3):
        if not (step == 1 and group.rank == 2):
            dist.all_reduce(torch.ones(2))
        dist.broadcast(torch.ones(3), src=0)


@pytest.mark.timeout(60)
def test_left_alone(group):  # -> extra_collective 0
    if group.rank == 0:
        dist.barrier()


@pytest.mark.timeout(60)
def test_other_dtype(group):  # -> collective_mismatch ?: int64 x 4
    t = torch.ones(4, dtype=torch.int64 if group.rank == 1 else torch.float32)
    dist.all_reduce(t)
    dist.barrier()


@pytest.mark.timeout(6)
def test_slow(group):  # -> SLOW slow 0,1
    for _ in range(10000):
        dist.all_reduce(torch.ones(1))
        time.sleep(0.05)


@pytest.mark.timeout(60)
def test_groups_in_opposite_order(group):  # -> HANG group_order_deadlock 0,1
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    for g in (first, second) if group.rank == 0 else (second, first):
        dist.all_reduce(torch.ones(1), group=g)


@pytest.mark.timeout(60)
def test_fails_while_the_other_works(group):  # -> FAIL assertion 1
    if group.rank == 0:
        time.sleep(2.5)
    assert group.rank == 0


def test_next_one_passes(group):  # -> passes
    dist.barrier()


@world_size(3)
def test_healthy_send_while_others_have_ended(group):  # -> passes
    if group.rank == 0:
        work = dist.isend(torch.ones(1), 1)
        time.sleep(2.5)
        work.wait()
    elif group.rank == 1:
        dist.recv(torch.ones(1), 0)


def test_healthy_gather_then_one_is_slow(group):  # -> passes
    t = torch.ones(3)
    dist.gather(t, [torch.empty(3) for _ in range(2)] if group.rank == 0 else None)
    if group.rank == 1:
        time.sleep(2.5)
    dist.barrier()


@world_size(4)
def test_healthy_subgroups_while_one_is_slow(group):  # -> passes
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    if group.rank == 3:
        time.sleep(2.5)
    dist.all_reduce(torch.ones(1), group=groups[group.rank // 2])
    dist.barrier()


def test_healthy_work_after_the_other_has_ended(group):  # -> passes
    if group.rank == 1:
        time.sleep(2.5)
