"""Rough faults, between tests that pass."""

import ctypes
import os
import resource
import signal
import sys
import threading
import time

import pytest
import torch.distributed as dist


class Unpicklable(Exception):
    def __init__(self, lock):
        super().__init__(lock)
        self.lock = lock

    def __reduce__(self):
        raise TypeError("not picklable")


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("cannot say")


@pytest.fixture
def no_set_up(group):
    if group.rank == 1:
        raise RuntimeError("no set-up on this rank")
    dist.barrier()


@pytest.fixture
def hangs_in_set_up(group):
    if group.rank == 1:
        time.sleep(1000)


@pytest.fixture
def hangs_in_teardown(group):
    yield
    if group.rank == 1:
        time.sleep(1000)


def test_sys_exit(group):  # -> FAIL rank_exited 1
    if group.rank == 1:
        sys.exit(3)
    dist.barrier()


def test_abort(group):  # -> CRASH rank_died 1: native code crashed
    if group.rank == 1:
        os.abort()
    dist.barrier()


def test_unpicklable(group):  # -> FAIL assertion 0,1
    raise Unpicklable(threading.Lock())


def test_unprintable(group):  # -> FAIL assertion 0,1
    raise Unprintable()


def test_long_text(group):  # -> FAIL rank_exception 1
    if group.rank == 1:
        raise ValueError("x" * 100_000_000)


def test_set_up_fails(group, no_set_up):  # -> FAIL rank_exception 1
    pass


@pytest.mark.timeout(5)
def test_set_up_hangs(group, hangs_in_set_up):  # -> HANG sleeping 1
    dist.barrier()


@pytest.mark.timeout(5)
def test_teardown_hangs(group, hangs_in_teardown):  # -> HANG sleeping 1
    pass


@pytest.mark.timeout(5)
def test_native_call_that_holds_the_gil(group):  # -> HANG gil_held 1
    if group.rank == 1:
        ctypes.PyDLL(None).sleep(1000)
    dist.barrier()


def test_no_descriptors(group):  # -> FAIL rank_exception 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    if group.rank == 1:
        keep = [open("/dev/null") for _ in range(100)]


def test_closes_everything(group):  # -> ? ?
    if group.rank == 1:
        os.closerange(3, 4096)
    assert group.rank == 0


def test_interrupts_itself(group):  # -> FAIL rank_exception 1
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGINT)
    dist.barrier()


def test_recursion(group):  # -> FAIL assertion 0,1
    def deeper():
        return deeper()

    deeper()


def test_loses_its_folder(group, tmp_path):  # -> FAIL assertion 1
    os.chdir(tmp_path)
    dist.barrier()
    if group.rank == 0:
        tmp_path.rmdir()
    dist.barrier()
    assert group.rank == 0
