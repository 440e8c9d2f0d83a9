"""Planted: a rank that stands somewhere, or works on and on, while the others wait for it."""

from __future__ import annotations

import ctypes
import os
import queue
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pytest_nsa.fixtures import DDP, Group
from tests_cpu.faults.planting import AT, Net, net, planted, train


def at(group: Group, culprit: int, fault: Callable[[], Any]) -> None:
    """Six rounds of an all_reduce; in round AT, rank ``culprit`` calls ``fault()``."""
    for step in range(6):
        if group.rank == culprit and step == AT:
            fault()
        dist.all_reduce(torch.ones(2))


def train_with(ddp: DDP, culprit: int, *, forward: Any = None, backward: Any = None, block: int = 1) -> None:
    """Training in which a block calls ``forward`` or ``backward`` from step AT on."""
    model = ddp.wrap(net())
    inner = model.module
    assert isinstance(inner, Net)

    def plant() -> None:
        inner.blocks[block].fault = forward or inner.blocks[block].fault
        inner.blocks[block].in_backward = backward

    train(model, ddp.rank, culprit=culprit, before=plant)


def spin() -> None:
    """For ever."""
    number = 0
    while True:
        number = (number + 1) % 1000


@planted("lock_deadlock", [1], where="test_planted.py")
def test_a_lock_that_is_held_already(group: Group) -> None:
    lock = threading.Lock()

    def fault() -> None:
        with lock, lock:
            pass

    at(group, 1, fault)


class LockedBackward(torch.autograd.Function):
    """Waits in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, lock: Any) -> torch.Tensor:
        ctx.lock = lock
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        with ctx.lock:
            return gradients[0], None


@planted("lock_deadlock", [0])
def test_a_lock_in_backward(ddp: DDP) -> None:
    lock = threading.Lock()

    class Locked(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return LockedBackward.apply(x, lock)

    model = ddp.wrap(nn.Sequential(nn.Linear(8, 8), Locked(), nn.Linear(8, 1)))
    train(model, ddp.rank, culprit=0, before=lock.acquire)


@planted("lock_deadlock", [2], n=4)
def test_an_empty_queue(group: Group) -> None:
    at(group, 2, queue.Queue().get)


@planted("lock_deadlock", [1])
def test_two_threads_and_two_locks(group: Group) -> None:
    def fault() -> None:
        first, second, both = threading.Lock(), threading.Lock(), threading.Barrier(2)

        def take(a: Any, b: Any) -> None:
            with a:
                both.wait()
                with b:
                    pass

        threading.Thread(target=take, args=(second, first), daemon=True).start()
        take(first, second)

    at(group, 1, fault)


@planted("lock_deadlock", [1], reason="in a gradient hook")
def test_a_lock_in_a_gradient_hook(ddp: DDP) -> None:
    lock = threading.Lock()
    lock.acquire()
    train_with(ddp, 1, backward=lock.acquire)


@planted("infinite_loop", [0], where="in spin")
def test_a_loop_in_forward(ddp: DDP) -> None:
    train_with(ddp, 0, forward=spin)


@planted("infinite_loop", [1], where="in spin")
def test_a_loop_in_a_hook(ddp: DDP) -> None:
    train_with(ddp, 1, backward=spin)


@planted("infinite_loop", [3], n=4)
def test_a_loop_of_four(group: Group) -> None:
    at(group, 3, spin)


@planted("infinite_loop", [1])
def test_a_loop_over_tensors(group: Group) -> None:
    def fault() -> None:
        x = torch.ones(3)
        while x.sum() > 0:
            x = x * 1.0

    at(group, 1, fault)


@planted("sleeping", [0], where="test_planted.py")
def test_sleeps(group: Group) -> None:
    at(group, 0, lambda: time.sleep(1000))


@planted("sleeping", [1], n=4)
def test_sleeps_in_forward_of_four(ddp: DDP) -> None:
    train_with(ddp, 1, forward=lambda: time.sleep(1000))


@planted("sleeping", [1])
def test_polls_for_a_file(group: Group) -> None:
    def fault() -> None:
        while not Path("/no/such/file").exists():
            time.sleep(0.1)

    at(group, 1, fault)


@planted("native_busy", [1])
def test_a_long_product(group: Group) -> None:
    def fault() -> None:
        a = torch.randn(3000, 3000)
        for _ in range(1000):
            torch.linalg.svd(a)

    at(group, 1, fault)


@planted("native_busy", [0])
def test_a_long_native_call(group: Group) -> None:
    import hashlib

    at(group, 0, lambda: hashlib.pbkdf2_hmac("sha256", b"x", b"y", 10**9))


@planted("gil_held", [1])
def test_native_code_holds_the_gil(group: Group) -> None:
    at(group, 1, lambda: ctypes.PyDLL(None).sleep(1000))


@planted("gil_held", [0])
def test_native_code_holds_the_gil_in_backward(ddp: DDP) -> None:
    train_with(ddp, 0, backward=lambda: ctypes.PyDLL(None).usleep(999_999_999))


@planted("io_stuck", [1])
def test_opens_a_fifo(group: Group, tmp_path: Path) -> None:
    path = tmp_path / f"fifo{group.rank}"
    os.mkfifo(path)
    at(group, 1, lambda: path.open("rb"))


@planted("io_stuck", [0], n=3)
def test_reads_a_pipe(group: Group) -> None:
    reader, _writer = os.pipe()
    at(group, 0, lambda: os.read(reader, 1))


@planted("io_stuck", [1])
def test_reads_a_socket(group: Group) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    at(group, 1, lambda: client.recv(1))


@planted("child_process", [0])
def test_waits_for_a_child(group: Group) -> None:
    at(group, 0, lambda: subprocess.run(["sleep", "1000"], check=False))


@planted("child_process", [2], n=3)
def test_waits_for_a_python_child(group: Group) -> None:
    import multiprocessing

    def fault() -> None:
        process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
        process.start()
        process.join()

    at(group, 2, fault)


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


@planted("dataloader_stuck", [1], where="test_planted.py")
def test_a_loader_s_worker_sleeps(group: Group) -> None:
    for x in torch.utils.data.DataLoader(Stuck((lambda: time.sleep(1000)) if group.rank == 1 else None), num_workers=1):
        dist.all_reduce(x)


@planted("dataloader_stuck", [0])
def test_a_loader_s_worker_waits_for_a_lock(ddp: DDP) -> None:
    lock = threading.Lock()
    lock.acquire()
    model = ddp.wrap(nn.Linear(8, 1))
    for x in torch.utils.data.DataLoader(Stuck(lock.acquire if ddp.rank == 0 else None), num_workers=2):
        model(x).sum().backward()


@planted("compiling", [1])
def test_a_compile_that_takes_long(group: Group) -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        end = time.monotonic() + 1000
        while time.monotonic() < end:
            sum(range(1000))
        return graph.forward

    at(group, 1, lambda: torch.compile(lambda x: x * 2, backend=backend)(torch.ones(2)))


@planted("backward_deadlock", [0, 1])
def test_backward_waits_for_a_backward_in_another_thread(group: Group) -> None:
    import select

    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            select.select([], [], [], 1000)
            return gradients[0]

    model = nn.Linear(4, 4)
    Waits.apply(model(torch.ones(2, 4))).sum().backward()


@planted("straggler", [1])
def test_one_rank_is_slow(ddp: DDP) -> None:
    train_slowly(ddp, 1)


@planted("straggler", [2], n=4)
def test_one_rank_of_four_is_slow(ddp: DDP) -> None:
    train_slowly(ddp, 2)


def train_slowly(ddp: DDP, culprit: int) -> None:
    """Each block of one rank takes half a second."""
    model = ddp.wrap(net())
    inner = model.module
    assert isinstance(inner, Net)
    if ddp.rank == culprit:
        for block in inner.blocks:
            block.fault = lambda: time.sleep(0.4)
    train(model, ddp.rank, steps=1000)


@planted("straggler", [0])
def test_one_rank_needs_seconds_for_a_step(ddp: DDP) -> None:
    model = ddp.wrap(net())
    for _ in range(1000):
        time.sleep(1.9 if ddp.rank == 0 else 0)
        model(torch.ones(2, 8)).sum().backward()


@planted("slow", [0, 1])
def test_all_ranks_are_slow(ddp: DDP) -> None:
    model = ddp.wrap(net())
    for block in model.module.blocks:
        block.fault = lambda: time.sleep(0.2)
    train(model, ddp.rank, steps=1000)


class Scan(nn.Module):
    """Position by position: three autograd nodes each, and the backward of each selection makes zeros of x's whole size."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, S, dim] -> the same."""
        return torch.stack([x[:, t] * self.weight for t in range(x.shape[1])], dim=1)


@planted("graph_explosion", [0, 1], reason="blocks.1.scan")
def test_a_module_with_sixty_thousand_autograd_nodes(ddp: DDP) -> None:
    class Layer(nn.Module):
        def __init__(self, scans: bool) -> None:
            super().__init__()
            self.scan = Scan(64) if scans else nn.Identity()
            self.out = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scan(self.out(x))

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Layer(False), Layer(True)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    ddp.wrap(Stack())(torch.ones(1, 20_000, 64)).sum().backward()


@planted("sleeping", [1], n=3, reason="rank 2")
def test_two_causes_at_once(group: Group) -> None:
    lock = threading.Lock()
    lock.acquire()
    if group.rank == 1:
        time.sleep(1000)
    if group.rank == 2:
        lock.acquire()
    dist.all_reduce(torch.ones(1))


@planted("infinite_loop", [0])
def test_a_file_is_asked_for_without_a_pause(group: Group, tmp_path: Path) -> None:
    def fault() -> None:
        while not (tmp_path / "ready").exists():
            pass

    at(group, 0, fault)


@planted("io_stuck", [1])
def test_selects_on_a_silent_socket(group: Group) -> None:
    import select

    with socket.create_server(("127.0.0.1", 0)) as server:
        at(group, 1, lambda: select.select([server], [], []))
