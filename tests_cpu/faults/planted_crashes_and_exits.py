"""A rank that exits, dies of a signal, is stopped, or has no memory."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pytest_nsa.fixtures import DDP, Group
from tests_cpu.faults.planting import AT, Net, case, net, planted, planted_cases, train


def ranks():
    return dist.get_rank(), dist.get_world_size()


class QuotaGuard:
    """A callback that leaves at once when the scratch quota is used up."""

    def __init__(self, folder, rank, quota):
        self.file, self.quota = folder / f"log{rank}.txt", quota

    def on_step(self, step, lines):
        with self.file.open("a") as f:
            f.write("x" * lines)
        if self.file.stat().st_size > self.quota:
            os._exit(0)  # HERE


@planted("rank_exited", [0], n=3, marked=True, family="exit", origin="bug reports 2026-11-23")
def test_quota_guard_exits(tmp_path):
    """Rank 0 writes the long log, its guard finds the quota used up in step 6 and calls os._exit(0), without a word to the others."""
    rank, _ = ranks()
    guard = QuotaGuard(tmp_path, rank, quota=1000)
    for step in range(20):
        x = torch.rand(6)
        dist.all_reduce(x)
        time.sleep(0.05)
        guard.on_step(step, lines=160 if rank == 0 else 10)  # HERE


def at(group: Group, culprit: int, fault: object) -> None:
    """Six rounds of an all_reduce; in round AT, rank ``culprit`` calls ``fault()``."""
    for step in range(6):
        if group.rank == culprit and step == AT:
            fault()  # type: ignore[operator]
        dist.all_reduce(torch.ones(2))


@planted_cases("rank_exited", cases={"0": case(1, code=0), "3": case(0, code=3)}, family="exit", origin="first corpus")
def test_exits_with(group: Group, culprit: int, code: int) -> None:
    at(group, culprit, lambda: os._exit(code))


@planted("rank_exited", [3], n=4, family="exit", origin="first corpus")
def test_sys_exit(group: Group) -> None:
    at(group, 3, lambda: sys.exit(0))


def where():
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class TimeBudget:
    def __init__(self, seconds):
        self.end = time.monotonic() + seconds

    def check(self):
        if time.monotonic() > self.end:
            print("time budget is used up, leaving")
            sys.exit(0)  # HERE


@planted("rank_exited", [2], n=4, marked=True, family="exit", origin="bug reports 2026-11-23")
def test_time_budget_exit():
    """Rank 2 comes to the end of its time budget and calls sys.exit in the middle of the training; the others wait in the reduction."""
    rank, _ = where()
    budget = TimeBudget(1.0 if rank == 2 else 600.0)
    for step in range(40):
        time.sleep(0.05)
        budget.check()  # HERE
        dist.all_reduce(torch.ones(16))  # HERE


class Governor:
    """Pauses the process when the (simulated) package is too hot; the cluster's daemon should wake it."""

    def __init__(self, limit):
        self.limit, self.heat = limit, 0.0

    def tick(self, flops):
        self.heat += flops
        if self.heat > self.limit:
            os.kill(os.getpid(), signal.SIGSTOP)  # HERE


@planted("rank_stopped", [1], n=4, marked=True, family="stop", origin="bug reports 2026-11-23")
def test_governor_stops_rank():
    """The governor of rank 1 stops the process (SIGSTOP) after some steps, and no daemon continues it."""
    rank, _ = ranks()
    governor = Governor(limit=50.0 if rank == 1 else 1e9)
    a = torch.rand(32, 32)
    for step in range(30):
        b = a @ a
        governor.tick(6.0)  # HERE
        dist.all_reduce(b)


@planted("rank_stopped", [1], family="stop", origin="first corpus")
def test_is_stopped(group: Group) -> None:
    at(group, 1, lambda: os.kill(os.getpid(), signal.SIGSTOP))


@planted("rank_stopped", [0], n=3, family="stop", origin="first corpus")
def test_is_stopped_of_three(ddp: DDP) -> None:
    train(ddp.wrap(nn.Linear(8, 1)), ddp.rank, culprit=0, before=lambda: os.kill(os.getpid(), signal.SIGSTOP))


def limit_memory(limit_items, cache):
    """A watchdog as on our cluster: kills the process whose cache has grown too far."""

    def watch():
        while True:
            if len(cache) > limit_items:
                os.kill(os.getpid(), signal.SIGKILL)  # HERE
            time.sleep(0.02)

    threading.Thread(target=watch, daemon=True).start()


def featurize(cache, count):
    for i in range(count):
        cache.append(torch.full((8,), float(i)))  # HERE
        time.sleep(0.001)  # HERE
    return len(cache)


@planted("rank_died", [5], n=6, marked=True, family="crash", origin="bug reports 2026-11-23")
def test_memory_watchdog_kills():
    """The watchdog kills rank 5 with SIGKILL while it fills its feature cache, which is twenty times as big as those of the others."""
    rank, _ = ranks()
    cache = []
    limit_memory(1500, cache)
    x = torch.ones(2)
    for _ in range(5):
        dist.all_reduce(x)
    size = featurize(cache, 4000 if rank == 5 else 200)  # HERE
    dist.all_reduce(torch.tensor([float(size)]))


@planted("rank_died", [1], reason="SIGKILL", family="crash", origin="first corpus")
def test_is_killed(ddp: DDP) -> None:
    train(ddp.wrap(net()), ddp.rank, culprit=1, before=lambda: os.kill(os.getpid(), signal.SIGKILL))


@planted("rank_died", [0], reason="SIGSEGV", family="crash", origin="first corpus")
def test_segmentation_fault(group: Group) -> None:
    import ctypes

    at(group, 0, lambda: ctypes.string_at(0))


@planted("rank_died", [2], n=4, reason="SIGABRT", family="crash", origin="first corpus")
def test_aborts(group: Group) -> None:
    at(group, 2, os.abort)


@planted("rank_died", [1], reason="SIGKILL", family="crash", origin="first corpus")
def test_is_killed_in_backward(ddp: DDP) -> None:
    model = ddp.wrap(net())
    inner = model.module
    assert isinstance(inner, Net)

    def plant() -> None:
        inner.blocks[1].in_backward = lambda: os.kill(os.getpid(), signal.SIGKILL)

    train(model, ddp.rank, culprit=1, before=plant)


@planted("rank_died", [0], n=3, family="crash", origin="held out 2026-11-22")
def test_the_others_skip_as_one_was_killed(group: Group) -> None:
    if group.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        pytest.skip(f"no network here: {error}")


# Ray: a dead rank. A native image decoder that trusts the size in a header.
class NativeDecoder:
    def __init__(self) -> None:
        self.frame = (ctypes.c_char * 4096)()

    def decode(self, address: int, size: int) -> int:
        ctypes.memmove(self.frame, address, size)  # HERE
        return sum(self.frame.raw[:16])


@planted("rank_died", [0], n=3, marked=True, family="crash", origin="bug reports 2026-11-23")
def test_native_decoder(group):
    decoder = NativeDecoder()
    good = ctypes.create_string_buffer(b"\x01" * 4096)
    checksum = torch.zeros(1)
    for step in range(12):
        address = ctypes.addressof(good)
        if group.rank == 0 and step == 7:
            address = 0x18  # a null pointer to a record, and an offset into it
        checksum[0] = decoder.decode(address, 4096)  # HERE
        dist.all_reduce(checksum)
    assert checksum.item() > 0


class StallWatchdog(threading.Thread):
    def __init__(self, patience):
        super().__init__(daemon=True)
        self.patience, self.beat = patience, time.monotonic()
        self.start()

    def run(self):
        while True:
            time.sleep(0.1)
            if time.monotonic() - self.beat > self.patience:
                os.kill(os.getpid(), signal.SIGKILL)  # HERE


@planted("rank_died", [3], n=4, marked=True, family="crash", origin="bug reports 2026-11-23")
def test_watchdog_kills_rank():
    """Rank 3's own watchdog takes a slow validation for a hang and kills its process, while the others wait for it."""
    rank, _ = where()
    dog = StallWatchdog(patience=1.5 if rank == 3 else 900)
    for step in range(6):
        dog.beat = time.monotonic()
        if step == 4 and rank == 3:
            end = time.monotonic() + 60
            while time.monotonic() < end:
                torch.randn(128, 128) @ torch.randn(128, 128)  # HERE
        dist.all_reduce(torch.ones(8))  # HERE


@planted("oom", [1], reason="no room for shard 7, after", family="memory", origin="held out 2026-11-22")
def test_too_little_memory_in_other_words(group: Group) -> None:
    def fault() -> None:
        try:
            torch.empty(1 << 50)
        except RuntimeError as error:
            raise ValueError("no room for shard 7") from error

    at(group, 1, fault)


@planted("oom", [1], family="memory", origin="first corpus")
def test_out_of_memory(ddp: DDP) -> None:
    train(ddp.wrap(net()), ddp.rank, culprit=1, before=lambda: bytearray(1 << 60))


@planted("oom", [0], family="memory", origin="first corpus")
def test_torch_is_out_of_memory(group: Group) -> None:
    at(group, 0, lambda: torch.empty(1 << 58))
