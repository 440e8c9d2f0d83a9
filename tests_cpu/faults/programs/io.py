"""Programs in which a file, pipe or socket is waited for."""

from __future__ import annotations

import asyncio
import os
import socket
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
def test_an_executor_of_the_loop_reads_a_silent_socket(group, culprit):
    mine, _theirs = socket.socketpair()

    def read():
        return mine.recv(1)  # HERE

    async def fetch():
        return await asyncio.get_running_loop().run_in_executor(None, read)

    at(group, culprit, lambda: asyncio.run(fetch()))


@planted(2, rank=1)
def test_opens_a_fifo(group: Group, tmp_path: Path, culprit: int) -> None:
    path = tmp_path / f"fifo{group.rank}"
    os.mkfifo(path)
    at(group, culprit, lambda: path.open("rb"))
