"""A call between two rounds, a turn that another rank took, a barrier by hand in the store: after programs whose authors had not
read the rules. HERE marks the line that a verdict may name.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from tests_cpu.faults.planting import planted


class TimedCheckpoint:
    """Saves when so many seconds have passed by this rank's own clock."""

    def __init__(self, every: float, began: float) -> None:
        self.every, self.last = every, began

    def __call__(self, save: Callable[[], None]) -> None:
        if time.monotonic() - self.last >= self.every:
            self.last = time.monotonic()
            save()


class Fit:
    def __init__(self, checkpoint: TimedCheckpoint) -> None:
        self.model, self.checkpoint = nn.Linear(8, 8), checkpoint

    def save(self) -> None:
        parts: list[object] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, {k: v.clone() for k, v in self.model.state_dict().items()})  # HERE

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.model(torch.randn(4, 8)).pow(2).mean().backward()
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.grad)
            time.sleep(0.02)
            self.checkpoint(self.save)


@planted("extra_collective", [1], n=3, marked=True)
def test_a_checkpoint_by_each_rank_s_own_clock(group):
    cached = 2.5 if group.rank == 1 else 0.0  # its data was in a cache: its training began earlier
    Fit(TimedCheckpoint(every=4.0, began=time.monotonic() - cached)).run(400)


def send_metrics(row: torch.Tensor, callbacks: int) -> None:
    for _ in range(callbacks):
        dist.send(row, 0)  # HERE


@planted("p2p_unmatched", [3], n=4, marked=True)
def test_a_callback_that_was_restored_twice(group):
    row = torch.full((4096,), float(group.rank))
    if group.rank == 0:
        for _ in range(3):
            dist.recv(row)
    else:
        time.sleep(1.0 if group.rank == 2 else 0.1)
        send_metrics(row, callbacks=2 if group.rank == 3 else 1)
    dist.barrier()


class StoreBarrier:
    """A barrier in the store that a worker passes once."""

    def __init__(self, done: set[str]) -> None:
        self.store, self.done = dist.distributed_c10d._get_default_store(), done

    def wait(self, name: str) -> None:
        if name in self.done:
            return
        self.store.add(name, 1)
        while self.store.add(name, 0) < dist.get_world_size():
            time.sleep(0.02)  # HERE
        self.done.add(name)


@planted("missing_collective", [2], n=5, reason="wait for a key of a store")
def test_a_worker_that_thinks_it_has_passed(group):
    barrier = StoreBarrier(done={"epoch2"} if group.rank == 2 else set())
    for epoch in range(4):
        barrier.wait(f"epoch{epoch}")
        dist.all_reduce(torch.ones(32))


@planted("rank_stopped", [1], n=2)
def test_a_rank_that_looked_into_the_store_and_was_stopped(group):
    store = dist.distributed_c10d._get_default_store()
    if group.rank == 1:
        store.add("arrived", 1)
        os.kill(os.getpid(), signal.SIGSTOP)
    store.wait(["released"], timedelta(seconds=60))


@planted("p2p_unmatched", [0], n=3)
def test_a_server_that_takes_one_too_few(group):
    """The faster worker has sent more: it is no culprit."""
    row = torch.ones(65536)
    if group.rank == 0:
        for _ in range(4):
            dist.recv(row)
    else:
        for _ in range(3 if group.rank == 1 else 2):
            time.sleep(0.1 if group.rank == 1 else 0.4)
            dist.send(row, 0)
    dist.barrier()
