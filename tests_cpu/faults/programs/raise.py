"""Programs in which an exception."""

from __future__ import annotations

import asyncio
import contextlib
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from pytest_nsa import fixtures
from pytest_nsa import trace as traced
from pytest_nsa.fixtures import FSDP, Group, Trace
from tests_cpu.faults.planting import AT, TwoHeads, batch, net, planted, train


def reduced() -> torch.Tensor:
    x = torch.ones(4)
    dist.all_reduce(x)
    return x


class Service:
    """Ranks come and go together: at its end they meet in a group of its own."""

    def __init__(self) -> None:
        self.control = dist.new_group()

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        dist.barrier(group=self.control)


def describe_rate(text: str) -> float:
    key, value = text.split("=")  # HERE
    return float(value) if key == "rate" else 0.0


@planted(4, rank=2)
def test_the_end_of_a_with_holds_an_exception_up(group, culprit):
    """The exception of one rank runs into the barrier at the end of a `with`, while the others go on with their steps."""
    with Service():
        for step in range(6):
            reduced().mul_(describe_rate("rate:1" if group.rank == culprit and step == AT else "rate=1"))


def saved(step: int, folder: dict[int, float]) -> None:
    try:
        folder[step] = 1.0 / (AT - step)  # HERE
    except ZeroDivisionError:
        reduced()
        raise


@planted(2, rank=1)
def test_an_except_that_raises_again_holds_it_up(group, culprit):
    kept: dict[int, float] = {}
    for step in range(6):
        if group.rank == culprit:
            saved(step, kept)
        dist.barrier()


@planted(2, rank=1)
def test_fsdp_raises_on_one_rank(fsdp: FSDP, culprit: int) -> None:
    def plant() -> None:
        raise RuntimeError("no such sample")

    train(fsdp.wrap(net()), fsdp.rank, culprit=culprit, before=plant)


def ranks():
    return dist.get_rank(), dist.get_world_size()


@contextlib.contextmanager
def phase(name, timings):
    start = time.perf_counter()
    try:
        yield
    finally:
        dist.barrier()  # HERE
        timings[name] = time.perf_counter() - start


@planted(3, rank=1)
def test_finally_hides_error(culprit):
    """Rank 1 raises KeyError for an unknown label in the evaluation, and the finally of the context manager waits in a barrier while the others are in the all-reduce."""
    rank, _ = ranks()
    timings, labels = {}, {"cat": 0, "dog": 1}
    for epoch in range(3):
        with phase(f"train{epoch}", timings):
            x = torch.rand(5)
            dist.all_reduce(x)
        with phase(f"eval{epoch}", timings):  # HERE
            words = ["cat", "dog", "cow" if (rank, epoch) == (culprit, 1) else "dog"]
            hits = torch.tensor([float(sum(labels[w] for w in words))])  # HERE
            dist.all_reduce(hits)  # HERE
    assert len(timings) == 6


@planted(3, rank=1)
def test_an_assertion_in_a_loop_over_names(group, culprit):
    for name in ("warm up", "train", "test"):
        x = torch.ones(1)
        if name != "warm up":
            dist.all_reduce(x)
        assert (group.rank, name) != (culprit, "warm up")  # HERE


@traced("grads")
@planted(2)
def test_unused_on_purpose_and_another_assertion(ddp: fixtures.DDP, trace: Trace, faulty: bool) -> None:
    model = ddp.wrap(TwoHeads(both=False), find_unused_parameters=True)
    with trace(model):
        loss = model(batch(ddp.rank, 0)).sum()
        loss.backward()
    assert loss.abs().item() > (1e6 if faulty else 0), "the loss"  # HERE


@planted(3, rank=0)
def test_raises_in_a_data_loader_s_worker(group: Group, culprit: int) -> None:
    class Dataset(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> torch.Tensor:
            if group.rank == culprit and index == AT:
                raise ValueError("corrupt row")
            return torch.ones(2)

    for x in torch.utils.data.DataLoader(Dataset(), num_workers=1):
        dist.all_reduce(x)


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


@planted(2, rank=1)
def test_a_future_whose_task_has_ended(group, culprit):
    for step in range(5):
        lengths = [3, 9, 30] if (group.rank, step) == (culprit, AT) else [3, 9]
        dist.all_reduce(torch.tensor(float(asyncio.run(rollout(lengths)))))


@planted(3, rank=0)
def test_nobody_asks_the_future_of_a_save(group, culprit):
    store = dist.distributed_c10d._get_default_store()

    def save(step):
        if (group.rank, step) == (culprit, 2):
            raise OSError("disk full")  # HERE
        if group.rank == 0:
            store.set(f"saved{step}", "1")

    with ThreadPoolExecutor(1) as pool:
        for step in range(4):
            pool.submit(save, step)
            if group.rank:
                store.wait([f"saved{step}"])
            dist.barrier()


@planted(2, rank=1)
def test_a_task_that_reads_ahead_raises(group, culprit):
    async def read(tokens):
        for step in range(5):
            await asyncio.sleep(0.01)
            if (group.rank, step) == (culprit, AT):
                raise KeyError("token")  # HERE
            await tokens.put(step)

    async def train():
        tokens = asyncio.Queue()
        reader = asyncio.create_task(read(tokens))
        for _ in range(5):
            dist.all_reduce(torch.full((1,), float(await tokens.get())))
        await reader

    asyncio.run(train())


class Reader:
    """The position in a stream, which cannot be saved while the stream is open."""

    def __init__(self, is_open):
        self.is_open = is_open

    def __getstate__(self):
        if self.is_open:
            raise TypeError("cannot save an open stream")
        return {"is_open": False}


@planted(3, rank=1)
def test_a_stream_of_one_rank_cannot_be_saved(group, tmp_path, culprit):
    state = {"weight": torch.ones(4), f"reader.{group.rank}": Reader(group.rank == culprit)}
    dcp.save(state, checkpoint_id=str(tmp_path.parent / "saved"))  # HERE
