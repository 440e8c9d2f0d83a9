"""Programs in which a sleep or a poll."""

from __future__ import annotations

import datetime
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pytest_nsa.fixtures import Group
from tests_cpu.faults.planting import AT, planted


def at(group: Group, culprit: int, fault: Callable[[], Any]) -> None:
    """Six rounds of an all_reduce; in round AT, rank ``culprit`` calls ``fault()``."""
    for step in range(6):
        if group.rank == culprit and step == AT:
            fault()
        dist.all_reduce(torch.ones(2))


@planted(2, rank=1)
def test_polls_for_a_file(group: Group, culprit: int) -> None:
    def fault() -> None:
        while not Path("/no/such/file").exists():
            time.sleep(0.1)

    at(group, culprit, fault)


@planted(3)
def test_two_causes_at_once(group: Group, faulty: bool) -> None:
    lock = threading.Lock()
    if faulty:
        lock.acquire()
    if group.rank == 1:
        time.sleep(1000 if faulty else 0)
    if group.rank == 2:
        lock.acquire()
    dist.all_reduce(torch.ones(1))


def ranks():
    return dist.get_rank(), dist.get_world_size()


def with_backoff(call, first=0.5, factor=2.0):
    delay = first
    while True:
        try:
            return call()
        except OSError as error:
            logging.getLogger("storage").info("%s, again in %s s", error, delay)
            time.sleep(delay)  # HERE
            delay *= factor


@planted(7, rank=6)
def test_backoff_outlives_barrier(tmp_path, culprit):
    """Rank 6 sleeps ever longer in a retry loop for a vocabulary file with a misspelt name; the monitored barrier of the others gives up and raises."""
    rank, _ = ranks()
    if rank == 0:
        (tmp_path / "vocab_0.txt").write_text("a b c")
    dist.barrier()
    name = "vocab_0.txt" if rank != culprit else "vocab_O.txt"
    for step in range(3):
        x = torch.ones(4)
        dist.all_reduce(x)
    words = with_backoff(lambda: (tmp_path / name).read_text().split())  # HERE
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=6))
    assert len(words) == 3
