"""Healthy programs with exceptions, event loops, messages and reductions by hand that look like planted faults."""

from __future__ import annotations

import asyncio
import threading
import time

import torch
import torch.distributed as dist
from torch import nn

from pytest_nsa import check_divergence, world_size


def small_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def backward_of(model: nn.Module, step: int) -> None:
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(100 * dist.get_rank() + step))
    model(x).square().mean().backward()


def mean_over_ranks(tensors: list[torch.Tensor]) -> None:
    flat = torch.cat([t.reshape(-1) for t in tensors])
    dist.all_reduce(flat)
    for t, part in zip(tensors, flat.div_(dist.get_world_size()).split([t.numel() for t in tensors]), strict=True):
        t.copy_(part.view_as(t))


@world_size(2)
@check_divergence
def test_parameters_are_averaged_after_local_steps(group):
    """Local SGD by hand: between two averages the parameters differ, as they should."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(9):
        backward_of(model, step)
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 2:
            with torch.no_grad():
                mean_over_ranks(list(model.parameters()))


@world_size(2)
@check_divergence
def test_heads_of_their_own_on_a_shared_body(group):
    """The body's gradients are averaged by hand; each rank trains a head of its own."""
    body, head = small_model(), nn.Linear(4, 1)
    nn.init.constant_(head.weight, 1.0 + dist.get_rank())
    optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()])
    model = nn.Sequential(body, head)
    for step in range(5):
        backward_of(model, step)
        mean_over_ranks([p.grad for p in body.parameters()])
        optimizer.step()
        optimizer.zero_grad()


@world_size(3)
def test_a_retry_whose_cleanup_takes_long(group):
    """An attempt fails on one rank, its `finally` waits for a writer for 4 s, and the next attempt succeeds; the others wait."""
    for _ in range(4):
        dist.all_reduce(torch.ones(4))
    if group.rank == 1:
        for attempt in range(2):
            writer = threading.Thread(target=time.sleep, args=(4.0 if attempt == 0 else 0.0,))
            try:
                try:
                    writer.start()
                    if attempt == 0:
                        raise ConnectionResetError("the first attempt")
                finally:
                    writer.join()
            except ConnectionResetError:
                continue
    dist.barrier()


@world_size(2)
def test_a_future_that_another_thread_completes(group):
    """A task awaits what a thread computes for 4 s: no timer and no socket of the loop's own would wake it."""

    async def answer() -> int:
        return await asyncio.get_running_loop().run_in_executor(None, lambda: time.sleep(4.0) or 7)

    x = torch.tensor([float(asyncio.run(answer())) if group.rank == 0 else 0.0])
    dist.all_reduce(x)
    assert x.item() == 7.0


@world_size(3)
def test_calls_whose_ranks_may_give_different_sizes(group):
    """Uneven lists, split sizes, a message shorter than its buffer, bytes in place of numbers: each rank knows what comes."""
    rows = [1, 2, 3]
    taken = torch.empty(rows[group.rank] * 3)
    dist.all_to_all_single(taken, torch.ones(6), [rows[group.rank]] * 3, rows)
    if group.rank == 0:
        dist.send(torch.ones(2), 1)
        dist.send(torch.ones(4).view(torch.uint8), 1)
        dist.send_object_list(["text", 1], 1)
    elif group.rank == 1:
        dist.recv(torch.empty(3), 0)
        here = torch.empty(4)
        dist.recv(here, 0)
        assert here.tolist() == [1.0] * 4
        objects = [None, None]
        dist.recv_object_list(objects, 0)
        assert objects == ["text", 1]
    found = [None] * 3
    dist.all_gather_object(found, "x" * (10 * group.rank))
    assert len(found[2]) == 20
    for size in (4, 2, 5):  # data, and the same on all ranks
        dist.gather(torch.ones(size), [torch.empty(size) for _ in range(3)] if group.rank == 0 else None, dst=0)
    dist.barrier()


@world_size(2)
def test_messages_that_complete_before_their_work_is_dropped(group):
    works = [dist.isend(torch.ones(2), 1 - group.rank), dist.irecv(torch.empty(2), 1 - group.rank)]
    for work in works:
        work.wait()
    del works, work
    for _ in range(3):
        work = dist.all_reduce(torch.ones(2), async_op=True)  # its Work is dropped: gloo completes it all the same
        del work
    dist.barrier()
