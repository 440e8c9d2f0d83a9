"""Programs in which a data loader's worker stalls or dies."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from pytest_nsa.fixtures import Group
from tests_cpu.faults.planting import AT, planted


def at(group: Group, culprit: int, fault: object) -> None:
    """Six rounds of an all_reduce; in round AT, rank ``culprit`` calls ``fault()``."""
    for step in range(6):
        if group.rank == culprit and step == AT:
            fault()  # type: ignore[operator]
        dist.all_reduce(torch.ones(2))


@planted(2, rank=1)
def test_a_loader_s_worker_dies_with_a_batch_in_its_hands(group: Group, culprit: int) -> None:
    batches = torch.utils.data.DataLoader([torch.ones(2)] * 12, num_workers=1)
    iterator = iter(batches)

    def fault() -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # whose handler torch has, and would name the worker
        assert iterator._data_queue._reader.poll(10)  # type: ignore[attr-defined]
        (worker,) = multiprocessing.active_children()
        worker.kill()
        worker.join()
        next(iterator)

    at(group, culprit, fault)


class Stuck(torch.utils.data.Dataset[torch.Tensor]):
    """Whose item AT does not come on one rank."""

    def __init__(self, wait: Callable[[], Any] | None) -> None:
        self.wait = wait

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == AT and self.wait is not None:
            self.wait()
        return torch.ones(8)


@planted(2, rank=1)
def test_a_loader_s_worker_sleeps(group: Group, culprit: int) -> None:
    for x in torch.utils.data.DataLoader(
        Stuck((lambda: time.sleep(1000)) if group.rank == culprit else None), num_workers=1
    ):
        dist.all_reduce(x)
