"""Planted: a rank that raises, leaves, dies or is stopped."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pytest_nsa.fixtures import DDP, Group
from tests_cpu.faults.planting import AT, Net, net, planted, train


def at(group: Group, culprit: int, fault: object) -> None:
    """Six rounds of an all_reduce; in round AT, rank ``culprit`` calls ``fault()``."""
    for step in range(6):
        if group.rank == culprit and step == AT:
            fault()  # type: ignore[operator]
        dist.all_reduce(torch.ones(2))


def raise_it(error: BaseException) -> None:
    """For a lambda."""
    raise error


@planted("dataloader_stuck", [1])
def test_a_loader_s_worker_dies_with_a_batch_in_its_hands(group: Group) -> None:
    batches = torch.utils.data.DataLoader([torch.ones(2)] * 12, num_workers=1)
    iterator = iter(batches)

    def fault() -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # whose handler torch has, and would name the worker
        assert iterator._data_queue._reader.poll(10)  # type: ignore[attr-defined]
        (worker,) = multiprocessing.active_children()
        worker.kill()
        worker.join()
        next(iterator)

    at(group, 1, fault)


class Images(torch.utils.data.Dataset[torch.Tensor]):
    """Whose fifth does what ``fault`` does."""

    def __init__(self, fault: Callable[[], object]) -> None:
        self.fault = fault

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 4:
            self.fault()
        return torch.ones(2)


def load(rank: int, culprit: int, fault: Callable[[], object], timeout: float = 0) -> None:
    images = Images(fault if rank == culprit else int)
    for x in torch.utils.data.DataLoader(images, num_workers=1, timeout=timeout):
        dist.all_reduce(x)


@planted("dataloader_stuck", [1], reason="timed out after 1")
def test_a_loader_with_a_limit_of_its_own(group: Group) -> None:
    load(group.rank, 1, threading.Event().wait, timeout=1)


@planted("rank_exception", [0], where="in fault", reason="ValueError: cannot decode image 4, in DataLoader worker")
def test_a_loader_s_worker_raises(group: Group) -> None:
    def fault() -> None:
        raise ValueError("cannot decode image 4")

    load(group.rank, 0, fault)


@planted("oom", [1], reason="no room for shard 7, after")
def test_too_little_memory_in_other_words(group: Group) -> None:
    def fault() -> None:
        try:
            torch.empty(1 << 50)
        except RuntimeError as error:
            raise ValueError("no room for shard 7") from error

    at(group, 1, fault)


@planted("rank_exception", [1], where="test_planted.py", reason="ValueError: bad sample")
def test_raises(group: Group) -> None:
    at(group, 1, lambda: raise_it(ValueError("bad sample")))


@planted("rank_exception", [2], n=4)
def test_raises_of_four(group: Group) -> None:
    at(group, 2, lambda: raise_it(KeyError("sample")))


@planted("rank_exception", [0], reason="AssertionError")
def test_an_assertion_while_the_other_waits(group: Group) -> None:
    def fault() -> None:
        assert group.world_size == 3

    at(group, 0, fault)


@planted("rank_exception", [1])
def test_raises_in_backward(ddp: DDP) -> None:
    model = ddp.wrap(net())
    inner = model.module
    assert isinstance(inner, Net)

    def plant() -> None:
        inner.blocks[0].in_backward = lambda: 1 / 0

    train(model, ddp.rank, culprit=1, before=plant)


@planted("rank_exception", [0], n=3)
def test_raises_in_a_data_loader_s_worker(group: Group) -> None:
    class Dataset(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> torch.Tensor:
            if group.rank == 0 and index == AT:
                raise ValueError("corrupt row")
            return torch.ones(2)

    for x in torch.utils.data.DataLoader(Dataset(), num_workers=1):
        dist.all_reduce(x)


@planted("assertion", [0, 1])
def test_an_assertion_on_all(group: Group) -> None:
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 3


@planted("oom", [1])
def test_out_of_memory(ddp: DDP) -> None:
    train(ddp.wrap(net()), ddp.rank, culprit=1, before=lambda: bytearray(1 << 60))


@planted("oom", [0])
def test_torch_is_out_of_memory(group: Group) -> None:
    at(group, 0, lambda: torch.empty(1 << 58))


@planted("rank_exited", [1])
def test_exits_with_0(group: Group) -> None:
    at(group, 1, lambda: os._exit(0))


@planted("rank_exited", [0])
def test_exits_with_3(group: Group) -> None:
    at(group, 0, lambda: os._exit(3))


@planted("rank_exited", [3], n=4)
def test_sys_exit(group: Group) -> None:
    at(group, 3, lambda: sys.exit(0))


@planted("rank_died", [1], reason="SIGKILL")
def test_is_killed(ddp: DDP) -> None:
    train(ddp.wrap(net()), ddp.rank, culprit=1, before=lambda: os.kill(os.getpid(), signal.SIGKILL))


@planted("rank_died", [0], reason="SIGSEGV")
def test_segmentation_fault(group: Group) -> None:
    import ctypes

    at(group, 0, lambda: ctypes.string_at(0))


@planted("rank_died", [2], n=4, reason="SIGABRT")
def test_aborts(group: Group) -> None:
    at(group, 2, os.abort)


@planted("rank_died", [1], reason="SIGKILL")
def test_is_killed_in_backward(ddp: DDP) -> None:
    model = ddp.wrap(net())
    inner = model.module
    assert isinstance(inner, Net)

    def plant() -> None:
        inner.blocks[1].in_backward = lambda: os.kill(os.getpid(), signal.SIGKILL)

    train(model, ddp.rank, culprit=1, before=plant)


@planted("rank_stopped", [1])
def test_is_stopped(group: Group) -> None:
    at(group, 1, lambda: os.kill(os.getpid(), signal.SIGSTOP))


@planted("rank_stopped", [0], n=3)
def test_is_stopped_of_three(ddp: DDP) -> None:
    train(ddp.wrap(nn.Linear(8, 1)), ddp.rank, culprit=0, before=lambda: os.kill(os.getpid(), signal.SIGSTOP))


@planted("rank_died", [0], n=3)
def test_the_others_skip_as_one_was_killed(group: Group) -> None:
    if group.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        pytest.skip(f"no network here: {error}")


@planted("network_unusable", [0], reason="is in use by another process")
def test_a_port_that_is_taken(group: Group) -> None:
    if group.rank == 0:
        taken = socket.create_server(("127.0.0.1", 0))
        dist.TCPStore("127.0.0.1", taken.getsockname()[1], 1, True, timeout=timedelta(seconds=2))
    dist.barrier()


@planted(
    "network_unusable",
    [0, 1],
    reason="the host name no-such-host.invalid resolves to no address",
)
def test_a_host_name_that_resolves_nowhere(group: Group) -> None:
    dist.TCPStore("no-such-host.invalid", 29555, 2, False, timeout=timedelta(seconds=0.2))


@planted("init_timeout", [0], reason="tries to reach the host where the ranks of a group meet, or waits for them there")
def test_a_store_that_waits_for_a_rank_that_does_not_come(group: Group) -> None:
    if group.rank == 0:
        dist.TCPStore("127.0.0.1", 0, 2, True, timeout=timedelta(seconds=200))
    dist.barrier()


@planted("network_unusable", [0, 1], reason="GLOO_SOCKET_IFNAME=nsa77 names no interface")
def test_an_interface_that_is_not_there(group: Group) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "nsa77"
    dist.new_group([0, 1])


def form_again(**arguments: object) -> None:
    dist.destroy_process_group()
    dist.init_process_group("gloo", **arguments)  # type: ignore[arg-type]
    dist.all_reduce(torch.ones(1))


@planted("init_timeout", [2], n=3, where="in form_again", reason="ranks 0 and 2 call themselves rank 0 of 3")
def test_the_number_within_a_node(group: Group, tmp_path: Path) -> None:
    place = f"file://{tmp_path.parent / 'again'}"
    form_again(init_method=place, rank=group.rank % 2, world_size=3)


@planted("init_timeout", [1, 2], n=3, where="in form_again", reason="all 3 ranks call themselves rank 0 of 3")
def test_a_launcher_that_sets_no_rank(group: Group) -> None:
    """Whichever rank comes first serves the store: the others find its port in use."""
    os.environ["RANK"] = os.environ.get("SLURM_PROCID", "0")
    form_again()


@planted("init_timeout", [2], n=3, where="in form_again", reason="ranks 0 and 1 expect 3 ranks; rank 2 expects 4 ranks")
def test_sizes_of_the_world_that_differ(group: Group) -> None:
    os.environ["WORLD_SIZE"] = "4" if group.rank == 2 else "3"
    form_again()


@planted("init_timeout", [0, 1], where="in form_again", reason="the group is to have 3 ranks, and there are 2")
def test_a_world_that_is_smaller(group: Group) -> None:
    os.environ["WORLD_SIZE"] = "3"
    form_again()
