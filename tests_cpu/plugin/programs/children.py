"""Ranks that wait for processes that they started, or that use up their descriptors."""

# options: -o timeout=5 -p xdist -n 3
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading

import pytest
import torch.distributed as dist

from pytest_nsa import world_size

context = multiprocessing.get_context("fork")
KEPT = []


def refuse(answers):
    raise ValueError("no such file")


def is_killed(_):
    os.kill(os.getpid(), signal.SIGKILL)


@world_size(2)
def test_an_answer(group):  # -> child_process 1: one that it started has failed (exit code 1)
    if group.rank == 1:
        answers = context.Queue()
        context.Process(target=refuse, args=(answers,)).start()
        answers.get()
    dist.barrier()


@world_size(2)
def test_an_event(group):  # -> child_process 1: 2 that it started have failed (signal 9)
    if group.rank == 1:
        is_ready = context.Event()
        for _ in range(2):
            context.Process(target=is_killed, args=(is_ready,)).start()
        is_ready.wait()
    dist.barrier()


@world_size(2)
def test_a_command(group):  # -> child_process 1: waits for a child process
    if group.rank == 1:
        subprocess.run([sys.executable, "-c", "while True: pass"], check=True)
    dist.barrier()


@world_size(2)
def test_a_pool(group):  # -> child_process 1: a result of its pool, of 2 processes
    # A pool starts others in the place of processes that are killed, and what these computed is lost.
    if group.rank == 1:
        with context.Pool(2) as pool:
            pool.map(is_killed, range(2))
    dist.barrier()


def open_all(kept):
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    while True:
        kept.append(open(os.devnull))


@world_size(2)
def test_keeps_all_descriptors(group):  # -> passes
    with pytest.raises(OSError, match="Too many open files"):
        open_all(KEPT)


@world_size(2)
def test_raises_without_descriptors(group):  # -> rank_exception 1: OSError: [Errno 24] Too many open files
    if group.rank == 1:
        open_all([])
    dist.barrier()


@world_size(2)
def test_waits_without_descriptors(group):  # -> lock_deadlock 1
    kept = []
    with pytest.raises(OSError, match="Too many open files"):
        open_all(kept)
    if group.rank == 1:
        threading.Event().wait()
    dist.barrier()


@world_size(2)
def test_becomes_another_program(group):  # -> rank_exited 1
    if group.rank == 1:
        os.execv("/bin/sleep", ["sleep", "60"])
    dist.barrier()
