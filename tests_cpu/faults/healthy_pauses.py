"""Tests in which nothing is wrong, however it looks: each must pass, also where a hang may end a test."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pytest_nsa import world_size
from pytest_nsa.fixtures import DDP, FSDP, Group
from tests_cpu.faults.planting import Net, net, train

LONG_S = 2.5


def compute(seconds: float) -> None:
    """In Python."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(1000))


@world_size(2)
def test_a_long_compile_on_one_rank(group: Group) -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        compute(LONG_S)
        return graph.forward

    if group.rank == 0:
        torch.compile(lambda x: x * 2, backend=backend)(torch.ones(2))
    dist.barrier()


@world_size(2)
def test_slow_data(ddp: DDP) -> None:
    class Slow(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> torch.Tensor:
            time.sleep(1.2)
            return torch.ones(8)

    model = ddp.wrap(nn.Linear(8, 1))
    for x in torch.utils.data.DataLoader(Slow(), num_workers=1):
        model(x).sum().backward()


@world_size(2)
def test_uneven_load(ddp: DDP) -> None:
    model = ddp.wrap(net())
    for step in range(3):
        if step % 2 == ddp.rank:
            compute(LONG_S / 2)
        model(torch.ones(2, 8)).sum().backward()


@world_size(2)
def test_a_long_forward(ddp: DDP) -> None:
    model = ddp.wrap(net())
    inner = model.module
    assert isinstance(inner, Net)
    inner.blocks[1].fault = lambda: compute(LONG_S / 2)
    model(torch.ones(2, 8)).sum().backward()


@world_size(2)
def test_a_long_native_call(group: Group) -> None:
    import hashlib

    if group.rank == 1:
        hashlib.pbkdf2_hmac("sha256", b"x", b"y", 4_000_000)
    dist.barrier()


@world_size(2)
def test_long_python(group: Group) -> None:
    if group.rank == 0:
        compute(LONG_S)
    dist.barrier()


@world_size(2)
def test_evaluation_on_one_rank_and_a_barrier(ddp: DDP) -> None:
    model = ddp.wrap(net())
    model(torch.ones(2, 8)).sum().backward()
    if ddp.rank == 0:
        end = time.monotonic() + LONG_S
        with torch.no_grad():
            while time.monotonic() < end:
                model.module(torch.ones(64, 8))
    dist.barrier()


@world_size(2)
def test_a_big_checkpoint(group: Group, tmp_path: Path) -> None:
    if group.rank == 0:
        tensor = torch.ones(1 << 25)
        for number in range(4):
            torch.save(tensor, tmp_path / f"{number}.pt")
            (tmp_path / f"{number}.pt").unlink()
    dist.barrier()


@world_size(2)
def test_two_thousand_small_collectives(group: Group) -> None:
    total = torch.ones(1)
    for _ in range(2000):
        total.fill_(1)
        dist.all_reduce(total)
    assert total.item() == 2


@world_size(2)
def test_busy_cores(ddp: DDP) -> None:
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        train(ddp.wrap(net()), ddp.rank, steps=30)
    finally:
        for other in others:
            other.kill()
            other.wait()


@world_size(2)
def test_asynchronous_collectives_that_wait_for_each_other(group: Group) -> None:
    works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(5)]
    if group.rank == 1:
        time.sleep(1.5)
    for work in reversed(works):
        assert work is not None
        work.wait()


@world_size(2)
def test_a_lock_that_is_released(group: Group) -> None:
    lock = threading.Lock()
    lock.acquire()
    threading.Timer(1.5, lock.release).start()
    with lock:
        dist.barrier()


@world_size(2)
def test_accumulation_without_synchronisation(ddp: DDP) -> None:
    model = ddp.wrap(net())
    for _ in range(3):
        with model.no_sync():  # type: ignore[operator]
            model(torch.ones(2, 8)).sum().backward()
        model(torch.ones(2, 8)).sum().backward()


@world_size(2)
def test_forwards_without_backward_on_one_rank(ddp: DDP) -> None:
    model = ddp.wrap(net())
    for step in range(4):
        if ddp.rank == 0 and step == 2:
            model.module(torch.ones(2, 8))
        model(torch.ones(2, 8)).sum().backward()


@world_size(4)
def test_groups_of_two_that_do_different_things(group: Group) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[group.rank // 2]
    for _ in range(3 + group.rank // 2):
        dist.all_reduce(torch.ones(1 + group.rank // 2), group=mine)
    dist.barrier()


@world_size(2)
def test_sends_and_receives(group: Group) -> None:
    other = 1 - group.rank
    for _ in range(3):
        if group.rank == 0:
            time.sleep(0.5)
            dist.send(torch.ones(2), other)
        else:
            dist.recv(torch.ones(2), other)
    dist.barrier()


@world_size(2)
def test_fsdp_with_uneven_work(fsdp: FSDP) -> None:
    model = fsdp.wrap(net())
    for _ in range(3):
        if fsdp.rank == 1:
            time.sleep(0.7)
        model(torch.ones(2, 8)).sum().backward()


@world_size(2)
def test_a_nan_that_the_test_expects(ddp: DDP) -> None:
    model = ddp.wrap(net())
    loss = model(torch.full((2, 8), float("nan"))).sum()
    loss.backward()
    assert torch.isnan(loss)


@world_size(2)
def test_other_data_and_equal_gradients(ddp: DDP) -> None:
    train(ddp.wrap(net()), ddp.rank, steps=5)


@world_size(2)
def test_all_ranks_catch_the_same_exception(ddp: DDP) -> None:
    model = ddp.wrap(net())
    inner = model.module
    assert isinstance(inner, Net)
    for step in range(4):
        inner.blocks[0].fault = (lambda: 1 / 0) if step == 2 else (lambda: None)
        try:
            model(torch.ones(2, 8)).sum().backward()
        except ZeroDivisionError:
            continue


@world_size(4)
def test_two_models_on_two_ranks_each(group: Group) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = group.rank // 2
    model = nn.parallel.DistributedDataParallel(net(seed=mine), process_group=pairs[mine])
    train(model, group.rank, steps=3)
    dist.barrier()


@world_size(2)
def test_local_steps_and_their_mean(ddp: DDP) -> None:
    model = ddp.wrap(net())
    for _ in range(2):
        with model.no_sync():  # type: ignore[operator]
            train(model, ddp.rank, steps=2)
        for parameter in model.parameters():
            dist.all_reduce(parameter.data)
            parameter.data /= 2


@world_size(2)
def test_local_steps_after_their_last_mean(ddp: DDP) -> None:
    model = ddp.wrap(net())
    with model.no_sync():  # type: ignore[operator]
        train(model, ddp.rank, steps=2)
        flat = torch.cat([p.data.reshape(-1) for p in model.parameters()])
        dist.all_reduce(flat)
        nn.utils.vector_to_parameters(flat / 2, model.parameters())
        train(model, ddp.rank, steps=1)


@world_size(2)
def test_parameters_that_ddp_is_told_to_ignore(group: Group) -> None:
    model = net(seed=0)
    for parameter in model.head.parameters():
        torch.nn.init.constant_(parameter, 1.0 + group.rank)
    ignored = [f"head.{name}" for name, _ in model.head.named_parameters()]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    train(nn.parallel.DistributedDataParallel(model), group.rank, steps=3)


@world_size(2)
def test_an_optimizer_in_shards(ddp: DDP) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = ddp.wrap(net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    for _ in range(3):
        model(torch.ones(2, 8) + ddp.rank).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@world_size(4)
def test_a_model_of_a_pair_and_one_of_all(group: Group) -> None:
    pair = dist.new_group([0, 1])
    if group.rank < 2:
        train(nn.parallel.DistributedDataParallel(net(seed=1), process_group=pair), group.rank, steps=3)
    train(nn.parallel.DistributedDataParallel(net(seed=2)), group.rank, steps=3)


@world_size(2)
def test_a_forward_alone_is_not_synchronised(ddp: DDP) -> None:
    model = ddp.wrap(net())
    with model.no_sync():  # type: ignore[operator]
        loss = model(torch.ones(2, 8) + ddp.rank).sum()
    loss.backward()
    model(torch.ones(2, 8) + ddp.rank).sum().backward()
