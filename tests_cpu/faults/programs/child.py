"""Programs in which a child process is waited for."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import queue
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from pytest_nsa.fixtures import Group
from tests_cpu.faults.planting import AT, planted


@planted(2, rank=1)
def test_a_thread_of_a_pool_takes_from_a_queue_while_a_process_works(group, culprit):
    items, threads = queue.Queue(), concurrent.futures.ThreadPoolExecutor(1)
    threads.submit(items.get)
    if group.rank == culprit:
        context = multiprocessing.get_context("fork")
        concurrent.futures.ProcessPoolExecutor(1, mp_context=context).submit(time.sleep, 1000).result()  # HERE
    group.barrier()
    items.put(None)


def at(group: Group, culprit: int, fault: Callable[[], Any]) -> None:
    """Six rounds of an all_reduce; in round AT, rank ``culprit`` calls ``fault()``."""
    for step in range(6):
        if group.rank == culprit and step == AT:
            fault()
        dist.all_reduce(torch.ones(2))


@planted(2, rank=0)
def test_waits_for_a_child(group: Group, culprit: int) -> None:
    at(group, culprit, lambda: subprocess.run(["sleep", "1000"], check=False))


def square(queue, lock, number):
    with lock:  # HERE
        queue.put(number * number)


@planted(2, rank=1)
def test_workers_wait_for_a_lock_that_was_held_when_they_were_forked(group, culprit):
    fork, lock = multiprocessing.get_context("fork"), threading.Lock()
    dist.all_reduce(torch.ones(1))
    if group.rank == culprit:
        with fork.Manager() as manager:
            queue = manager.Queue()
            lock.acquire()
            workers = [fork.Process(target=square, args=(queue, lock, n), daemon=True) for n in range(2)]
            for worker in workers:
                worker.start()
            assert {queue.get(), queue.get()} == {0, 1}
    dist.all_reduce(torch.ones(1))
