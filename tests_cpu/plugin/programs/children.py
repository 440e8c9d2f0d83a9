"""Ranks that wait for processes that they started, or that use up their descriptors."""

# options: -o timeout=5 -p xdist -n 3
import multiprocessing
import os
import resource
import threading

import pytest
import torch.distributed as dist

context = multiprocessing.get_context("fork")
KEPT = []


def refuse(answers):
    raise ValueError("no such file")


def test_an_answer(group):  # -> child_process 1: one that it started has failed (exit code 1)
    if group.rank == 1:
        answers = context.Queue()
        context.Process(target=refuse, args=(answers,)).start()
        answers.get()
    dist.barrier()


def open_all(kept):
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    while True:
        kept.append(open(os.devnull))


def test_keeps_all_descriptors(group):  # -> passes
    with pytest.raises(OSError, match="Too many open files"):
        open_all(KEPT)


def test_waits_without_descriptors(group):  # -> lock_deadlock 1
    kept = []
    with pytest.raises(OSError, match="Too many open files"):
        open_all(kept)
    if group.rank == 1:
        threading.Event().wait()
    dist.barrier()


def test_becomes_another_program(group):  # -> rank_exited 1
    if group.rank == 1:
        os.execv("/bin/sleep", ["sleep", "60"])
    dist.barrier()
