"""Faults whose evidence lies beside stacks and order: an exception in flight, a loop's tasks, a store's keys, another thread,
ranks outside of a circle, gradients that are reduced by hand.

After programs whose authors had not read the rules. HERE marks the lines that a verdict may name.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from pytest_nsa import check_divergence
from tests_cpu.faults.planting import AT, batch, loss_of, planted


def default_store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def reduced() -> torch.Tensor:
    x = torch.ones(4)
    dist.all_reduce(x)
    return x


# An exception that cleanup holds up


class Service:
    """Ranks come and go together: at its end they meet in a group of its own."""

    def __init__(self) -> None:
        self.control = dist.new_group()

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        dist.barrier(group=self.control)


def rate_of(text: str) -> float:
    key, value = text.split("=")  # HERE
    return float(value) if key == "rate" else 0.0


@planted("rank_exception", [2], n=4, marked=True, reason="not enough values")
def test_the_end_of_a_with_holds_an_exception_up(group):
    """The exception of one rank runs into the barrier at the end of a `with`, while the others go on with their steps."""
    with Service():
        for step in range(6):
            reduced().mul_(rate_of("rate:1" if group.rank == 2 and step == AT else "rate=1"))


@contextmanager
def epoch(number: int):
    try:
        yield number
    finally:
        dist.barrier()


@planted("rank_exception", [0], n=3, marked=True, reason="KeyError")
def test_a_generators_finally_holds_an_exception_up(group):
    weights = {"text": 1.0, "code": 0.5} if group.rank else {"text": 1.0}
    for number in range(3):
        with epoch(number):
            for kind in ("text", "code") if number else ("text",):
                reduced().mul_(weights[kind])  # HERE


def saved(step: int, folder: dict[int, float]) -> None:
    try:
        folder[step] = 1.0 / (AT - step)  # HERE
    except ZeroDivisionError:
        reduced()
        raise


@planted("rank_exception", [1], marked=True, reason="ZeroDivisionError")
def test_an_except_that_raises_again_holds_it_up(group):
    kept: dict[int, float] = {}
    for step in range(6):
        if group.rank == 1:
            saved(step, kept)
        dist.barrier()


# A loop's tasks


class Engine:
    """Answers prompts in a task of its own, which ends where a prompt is too long: nobody looks at it."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[tuple[int, asyncio.Future[int]]] = asyncio.Queue()
        self.serving = asyncio.create_task(self.serve())

    async def serve(self) -> None:
        costs = {0: 1, 1: 2}
        while True:
            length, answer = await self.asked.get()
            answer.set_result(costs[length // 8])  # HERE

    async def generate(self, length: int) -> int:
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        await self.asked.put((length, answer))
        return await answer  # HERE


async def rollout(lengths: list[int]) -> int:
    engine = Engine()
    total = sum(await asyncio.gather(*(engine.generate(length) for length in lengths)))
    engine.serving.cancel()
    return total


@planted("rank_exception", [1], marked=True, reason="asyncio")
def test_a_future_whose_task_has_ended(group):
    for step in range(5):
        lengths = [3, 9, 30] if (group.rank, step) == (1, AT) else [3, 9]
        dist.all_reduce(torch.tensor(float(asyncio.run(rollout(lengths)))))


# A store's keys


def published(rank: int, epoch: int, parts: list[str]) -> None:
    if parts:
        default_store().set(f"index/{epoch}/{rank}", ",".join(parts))  # HERE


@planted("missing_collective", [2], n=3, marked=True, reason="index/2/2")
def test_an_empty_part_is_not_published(group):
    for epoch in range(4):
        parts = [] if (group.rank, epoch) == (2, 2) else [f"{epoch}-{group.rank}"]
        published(group.rank, epoch, parts)
        if parts:
            default_store().wait([f"index/{epoch}/{r}" for r in range(3)])
        dist.barrier()


@planted("missing_collective", [0], n=3, marked=True, reason="ended its test")
def test_a_teacher_that_publishes_only_what_is_better(group):
    best = 0.0
    for number, score in enumerate([0.2, 0.4, 0.3]):
        if group.rank:
            default_store().wait([f"teacher/{number}"])
        elif score > best:
            best = score
            default_store().set(f"teacher/{number}", "1")  # HERE


# Two methods of one name


class Gathered:
    def pull(self, piece: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(piece) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, piece)  # HERE
        return torch.cat(parts)


class Sent:
    def pull(self, piece: torch.Tensor) -> torch.Tensor:
        whole = torch.empty(piece.numel() * dist.get_world_size())
        dist.broadcast(whole, src=0)  # HERE
        return whole


@planted("collective_mismatch", [3], n=4, marked=True, miss="a method of two classes")
def test_a_rank_with_another_transport(group):
    transport = Sent() if group.rank == 3 else Gathered()
    dist.barrier()
    for _ in range(3):
        transport.pull(torch.ones(8))


# Messages


@planted("p2p_unmatched", [3], n=4, marked=True)
def test_the_last_stage_expects_a_batch_more(group):
    """10 rows in batches of 4: the last stage rounds up, the others down."""
    here = torch.empty(4)
    for _ in range(3 if group.rank == 3 else 2):
        if group.rank:
            dist.recv(here, src=group.rank - 1)  # HERE
        if group.rank < 3:
            dist.send(torch.ones(4), dst=group.rank + 1)
    dist.barrier()


@planted("p2p_unmatched", [2], n=3, marked=True)
def test_tags_by_the_number_of_chunks(group):
    """The last stage counts two chunks a batch. The first one waits as well, and for neither of the two."""
    chunks = 2 if group.rank == 2 else 1
    here = torch.ones(1 << 16)
    for number in range(4):
        if group.rank:
            dist.recv(here, src=group.rank - 1, tag=number * chunks)  # HERE
        if group.rank < 2:
            dist.send(here, dst=group.rank + 1, tag=number * chunks)  # HERE


# Ranks outside of the circle


@planted("group_order_deadlock", [0], n=3, marked=True, miss="who is not in the circle")
def test_a_third_rank_waits_at_the_end_for_two_in_a_circle(group):
    both = [dist.new_group([0, 1]) for _ in range(2)]
    if group.rank < 2:
        for step in range(5):
            for pair in reversed(both) if (group.rank, step) == (0, AT) else both:
                dist.all_reduce(torch.ones(8), group=pair)  # HERE
    dist.barrier()


@planted("skipped_collective", [2], n=4, marked=True)
def test_a_rank_that_has_left_waits_for_a_key(group):
    """One rank still reduces over all ranks, while the others leave out the one that has left and waits to be asked back."""
    all_ranks, without = dist.new_group(), dist.new_group([0, 1, 2])
    for step in range(8):
        if group.rank == 3 and step == 4:
            default_store().wait(["back/3"])
            break
        knows = step >= 4 and group.rank != 2
        dist.all_reduce(torch.ones(4), group=without if knows else all_ranks)  # HERE
    if group.rank == 0:
        default_store().set("back/3", "1")


# Hooks and ways through a model


@planted("hook_deadlock", [0], n=3, marked=True)
def test_a_hook_that_one_rank_has_a_larger_budget_for(group):
    torch.manual_seed(0)
    model, budget, statistics = nn.Linear(8, 1), [6 if group.rank == 0 else 3], dist.new_group()

    def sample(gradient: torch.Tensor) -> None:
        if budget[0] > 0:
            budget[0] -= 1
            dist.all_reduce(gradient.norm(), group=statistics)  # HERE

    model.weight.register_hook(sample)
    for _ in range(8):
        model(torch.ones(4, 8)).mean().backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.expert = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.base(x)
        return h + self.expert(h) if x.mean() > 0 else h


@planted("data_dependent_branch", [0], marked=True, reason="expert")
def test_hooks_of_a_part_that_one_ranks_data_pass_by(group):
    torch.manual_seed(0)
    model = Routed()
    for p in model.expert.parameters():
        p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))  # HERE
    for step in range(5):
        x = torch.rand(4, 8) - (2.0 if (group.rank, step) == (0, AT) else 0.0)
        model(x).sum().backward()
        dist.barrier()


@planted("extra_collective", [0], marked=True)
def test_what_all_but_the_first_rank_return_before(group):
    def export(parts: list[torch.Tensor]) -> torch.Tensor | None:
        if group.rank != 0:
            return None
        mine = torch.ones(4)
        dist.all_gather(parts, mine)  # HERE
        return torch.cat(parts)

    for _ in range(3):
        reduced()
    export([torch.empty(4) for _ in range(2)])


# Threads


class Reporter(threading.Thread):
    """Sums what it is told over all ranks, by the default group."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.told: queue.Queue[float] = queue.Queue()
        self.sums: queue.Queue[float] = queue.Queue()
        self.began = threading.Event()

    def run(self) -> None:
        while True:
            x = torch.tensor([self.told.get()])
            work = dist.all_reduce(x, async_op=True)  # HERE
            self.began.set()
            work.wait()
            self.sums.put(x.item())


@planted("collective_mismatch", [1], marked=True, reason="thread")
def test_a_thread_that_reports_by_the_default_group(group):
    reporter, parts = Reporter(), [torch.empty(6) for _ in range(2)]
    reporter.start()
    for step in range(5):
        if (group.rank, step) == (1, AT):
            reporter.told.put(64.0)
            reporter.began.wait()
        dist.all_gather(parts, torch.ones(6))
        if (group.rank, step) == (0, AT):
            reporter.told.put(64.0)
    reporter.sums.get()


# Gradients reduced by hand


def mean_in_one(parameters: list[nn.Parameter]) -> None:
    """Average the gradients in one tensor, in the order of ``parameters``."""
    flat = torch.cat([p.grad.reshape(-1) for p in parameters])
    dist.all_reduce(flat)
    for p, part in zip(
        parameters, flat.div_(dist.get_world_size()).split([p.numel() for p in parameters]), strict=True
    ):
        p.grad.copy_(part.view_as(p))


@planted("silent_divergence", [1], n=3, reason="by itself")
@check_divergence
def test_parameters_in_another_order_on_one_rank(group):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(3)], nn.Linear(8, 1))
    parameters = list(model.parameters())
    if group.rank == 1:
        parameters[0], parameters[1] = parameters[1], parameters[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, batch(group.rank, step)).backward()
        mean_in_one(parameters)
        optimizer.step()
