"""Tests in the bases of torch, and hangs that users reported (pytorch#194943, ROCm/pytorch#3526, deepspeedai/DeepSpeed#7334)."""

# options: -p xdist -n 2 -o timeout=60 -o ranks_hang_after=3
import os
import signal
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist

from pytest_nsa import OnRanks, reuse, world_size

pytest.importorskip("expecttest", reason="torch's own test utilities import it")
from torch.testing._internal import common_distributed as bases

if not hasattr(bases, "MultiProcContinuousTest"):
    pytest.skip("torch 2.6 has another base", allow_module_level=True)


# Workers that are kept for a class: one stalls, and the harness waits for its answer for ever. The subclass inherits them, dead.
@world_size(2, group=None)
class TestBase(OnRanks, bases.MultiProcContinuousTest):
    @classmethod
    def backend_str(cls):
        return "gloo"

    def test_a_passes(self):  # -> passes
        dist.barrier()

    def test_b_stalls(self):  # -> HANG sleeping 1 here
        if self.rank == 1:
            time.sleep(1000)  # HERE
        dist.barrier()

    def test_c_dies(self):  # -> rank_died 1 here
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)  # HERE
        dist.barrier()

    def test_d_comes_after(self):  # -> passes
        dist.barrier()


class TestSubclass(TestBase):
    def test_e_of_the_subclass(self):  # -> passes
        dist.barrier()


@world_size(2, group=None)
class TestTheirs(OnRanks, bases.MultiProcessTestCase):
    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_meets_by_a_file(self):  # -> passes
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
        value = torch.tensor([self.rank])
        dist.all_reduce(value)
        assert value.item() == 1

    @bases.skip_if_lt_x_gpu(8)
    def test_on_8_gpus(self):  # -> passes or skips
        raise ValueError

    def test_fails(self):  # -> assertion 1
        self.assertEqual(self.rank, 0)  # noqa: PT009  (the bases' own)


# A pool of four that is reused: its members meet in destroy_process_group, and one does not come.
@pytest.fixture
def torn_down():
    yield
    dist.barrier()
    dist.destroy_process_group()


@reuse
@world_size(4)
class TestPool:
    def test_before(self, group):  # -> passes
        dist.barrier()

    def test_does_not_come(self, group, torn_down):  # -> HANG lock_deadlock 3 here
        if group.rank == 3:
            threading.Event().wait()  # HERE

    def test_after(self, group):  # -> passes
        dist.barrier()


# gloo groups beside xdist: a fixed port is taken by the first process that binds it.
@world_size(2, group=None)
@pytest.mark.parametrize("again", range(2))
def test_groups_come_and_go(again):  # -> passes
    for _ in range(3):
        dist.init_process_group("gloo")
        dist.barrier()
        dist.destroy_process_group()


@world_size(2, group=None)
def test_a_port_that_is_taken():  # -> network_unusable 0 here
    with socket.create_server(("127.0.0.1", 0)) as taken:
        os.environ["MASTER_PORT"] = str(taken.getsockname()[1])
        dist.init_process_group("gloo")  # HERE
