"""Data loaders: workers that raise, die, sleep or wait."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

from pytest_nsa import fixtures
from pytest_nsa.fixtures import Group
from tests_cpu.faults.planting import AT, planted


def ranks():
    return dist.get_rank(), dist.get_world_size()


def average_gradients(model):
    flat = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    at = 0
    for p in model.parameters():
        p.grad.copy_(flat[at : at + p.numel()].view_as(p))
        at += p.numel()


class ShardedText(Dataset):
    """Samples in shards of 16, each shard a file that a fetcher is to put into the folder."""

    def __init__(self, folder, rank):
        self.folder, self.rank = folder / f"cache{rank}", rank
        self.folder.mkdir()
        for shard in range(6):
            if (rank, shard) != (2, 3):
                (self.folder / f"{shard}.bin").write_bytes(bytes(range(64)))

    def __len__(self):
        return 96

    def __getitem__(self, i):
        path = self.folder / f"{i // 16}.bin"
        deadline = time.time() + 60
        while not path.exists() and time.time() < deadline:
            time.sleep(0.05)  # HERE
        return torch.tensor(list(path.read_bytes()), dtype=torch.float32)


@planted("dataloader_stuck", [2], n=3, marked=True, family="loader", origin="bug reports 2026-11-23")
def test_shard_never_fetched(tmp_path):
    """The loader's worker of rank 2 waits for shard 3, which its fetcher never downloads, so rank 2 gets no batch."""
    rank, _ = ranks()
    data = ShardedText(tmp_path, rank)
    model = nn.Linear(64, 1)
    opt = torch.optim.SGD(model.parameters(), lr=1e-6)
    for batch in DataLoader(data, batch_size=8, num_workers=1):  # HERE
        opt.zero_grad()
        model(batch).pow(2).mean().backward()
        average_gradients(model)
        opt.step()


# A data loader's worker that is forked while a thread of its parent holds a lock: in the worker it stays locked
# (pytorch issues 1355 and 75147, iohub issue 416).
class IndexedShards(Dataset):
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.offsets = list(range(16))
        self.refreshing = threading.Event()

    def refresh(self) -> None:
        with self.lock:  # HERE
            self.refreshing.set()
            time.sleep(1.5)
            self.offsets = list(range(16))

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.lock:  # HERE
            offset = self.offsets[index]  # HERE
        return torch.full((4,), float(offset))


def end_with_parent(_worker: int) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no worker outlives its rank


@planted("dataloader_stuck", [1], n=2, marked=True, family="loader", origin="pytorch#1355")
def test_index_is_refreshed(group):
    shards = IndexedShards()
    if group.rank == 1:  # its copy of the index is older than the shards
        threading.Thread(target=shards.refresh, daemon=True).start()
        shards.refreshing.wait()
    total = torch.zeros(4)
    for batch in DataLoader(shards, batch_size=4, num_workers=1, worker_init_fn=end_with_parent):  # HERE
        total += batch.sum(0)
        dist.all_reduce(total)
    assert total[0] > 0


class Films(Dataset):
    def __init__(self, rank):
        self.rank = rank

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if self.rank == 2 and index == 21:
            os.kill(os.getpid(), signal.SIGKILL)  # HERE
        return torch.full((5,), float(index))


@planted(
    "dataloader_stuck",
    [2],
    n=3,
    marked=True,
    family="loader",
    origin="unseen 2026-11-26",
    miss="the line: the loop over a loader that lost its worker",
)
def test_a_worker_is_killed_while_its_rank_trains(group):
    """torch raises for it in whatever line the rank is at."""
    model = DDP(nn.Linear(5, 2))
    for x in DataLoader(Films(group.rank), batch_size=4, num_workers=2):  # HERE
        model(x).sum().backward()


def at(group: Group, culprit: int, fault: object) -> None:
    """Six rounds of an all_reduce; in round AT, rank ``culprit`` calls ``fault()``."""
    for step in range(6):
        if group.rank == culprit and step == AT:
            fault()  # type: ignore[operator]
        dist.all_reduce(torch.ones(2))


@planted("dataloader_stuck", [1], family="loader", origin="flake")
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


@planted("dataloader_stuck", [1], reason="timed out after 1", family="loader", origin="held out 2026-11-22")
def test_a_loader_with_a_limit_of_its_own(group: Group) -> None:
    load(group.rank, 1, threading.Event().wait, timeout=1)


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


@planted("dataloader_stuck", [1], where="test_planted.py", family="loader", origin="first corpus")
def test_a_loader_s_worker_sleeps(group: Group) -> None:
    for x in torch.utils.data.DataLoader(Stuck((lambda: time.sleep(1000)) if group.rank == 1 else None), num_workers=1):
        dist.all_reduce(x)


@planted("dataloader_stuck", [0], family="loader", origin="first corpus")
def test_a_loader_s_worker_waits_for_a_lock(ddp: fixtures.DDP) -> None:
    lock = threading.Lock()
    lock.acquire()
    model = ddp.wrap(nn.Linear(8, 1))
    for x in torch.utils.data.DataLoader(Stuck(lock.acquire if ddp.rank == 0 else None), num_workers=2):
        model(x).sum().backward()


@planted(
    "rank_exception",
    [0],
    where="in fault",
    reason="ValueError: cannot decode image 4, in DataLoader worker",
    family="raise",
    origin="held out 2026-11-22",
)
def test_a_loader_s_worker_raises(group: Group) -> None:
    def fault() -> None:
        raise ValueError("cannot decode image 4")

    load(group.rank, 0, fault)


@planted("rank_exception", [0], n=3, family="raise", origin="first corpus")
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
