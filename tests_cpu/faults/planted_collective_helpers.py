"""Collectives inside helpers, caches, meters and reducers that ranks call differently."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import random
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Sampler

from pytest_nsa.fixtures import Group
from tests_cpu.faults.planting import AT, planted


class Meter:
    def __init__(self) -> None:
        self.values = torch.zeros(3)

    def sync(self) -> None:
        dist.all_reduce(self.values)


def gather(values: torch.Tensor, world_size: int) -> list[object]:
    rows: list[object] = [None] * world_size
    dist.all_gather_object(rows, values.tolist())  # HERE
    return rows


@planted(
    "extra_collective",
    [1],
    n=3,
    where=" in sync",
    reason="where the others entered",
    family="extra",
    origin="generated 2026-11-23",
)
def test_a_helper_is_called_twice_in_a_round(group):
    """Both calls are the helper's: its callers tell them apart."""
    meter = Meter()
    for step in range(6):
        dist.broadcast(torch.ones(4), 0)
        if (group.rank, step) == (1, AT):
            meter.sync()
        meter.sync()
        gather(meter.values, group.world_size)


class Tree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word, self.join = nn.Embedding(20, 6), nn.Linear(12, 6)

    def forward(self, tree: Any) -> torch.Tensor:
        if isinstance(tree, int):
            return self.word(torch.tensor([tree]))
        both = self.join(torch.cat([self.forward(part) for part in tree], 1))
        mean = both.detach().mean(0)
        dist.all_reduce(mean)  # HERE
        return both - mean


@planted("extra_collective", [1], n=3, marked=True, family="extra", origin="generated 2026-11-23")
def test_a_tree_that_is_deeper(group):
    encoder = Tree()
    for step in range(8):
        deeper = (group.rank, step) == (1, 3)
        encoder((((0, 1), (2, 3)), 4) if deeper else ((0, 1), (2, 3)))
        dist.all_reduce(torch.tensor([5 if deeper else 4]))
        dist.all_reduce(torch.ones(100))


def clipped(model: nn.Module, data: torch.Tensor, limit: float) -> torch.Tensor:
    loss = model(data).pow(2).mean()
    if loss.item() > limit:
        dist.all_reduce(loss)  # HERE
    return loss.detach()


def mean_of(value: torch.Tensor) -> torch.Tensor:
    values = [torch.empty(()) for _ in range(dist.get_world_size())]
    dist.all_gather(values, value)  # HERE
    return torch.stack(values).mean()


@planted("extra_collective", [1], n=3, marked=True, family="extra", origin="unseen 2026-11-24")
def test_what_is_given_to_a_call_comes_before_it(group):
    """Both calls are of one line: `mean_of(clipped(...))`."""
    torch.manual_seed(0)
    model, data = nn.Linear(4, 4), torch.ones(2, 4)
    for step in range(6):
        size = 1e3 if (group.rank, step) == (1, AT) else 100.0 if step == 1 else 1.0
        mean_of(clipped(model, data * size, 50.0))  # HERE


log = logging.getLogger("turns")


def with_attempts(work, attempts=3):
    for attempt in range(attempts):
        try:
            return work()
        except OSError:
            log.warning("attempt %d failed", attempt)
            time.sleep(0.1)
    raise RuntimeError("all attempts failed")


@planted(
    "extra_collective",
    [1],
    n=4,
    marked=True,
    family="extra",
    origin="unseen 2026-11-25",
)
def test_what_is_tried_again_has_a_collective(group):
    """A rank makes a call again, with the collective in it."""
    failures = [2] if group.rank == 1 else []

    def load(epoch):
        dist.all_reduce(torch.zeros(1), op=dist.ReduceOp.MIN)  # HERE
        if epoch in failures:
            failures.remove(epoch)
            raise OSError("stale file handle")

    for epoch in range(5):
        with_attempts(lambda epoch=epoch: load(epoch))
        for _ in range(3):
            dist.all_reduce(torch.ones(32))


@planted("collective_mismatch", [2], n=3, marked=True, family="swap", origin="generated 2026-11-23")
def test_two_helpers_change_places(group):
    """Both branches of an ``if`` call what communicates: neither rank left anything out."""
    meter = Meter()
    for step in range(6):
        if (group.rank, step) == (2, AT):
            gather(meter.values, group.world_size)  # HERE
        else:
            meter.sync()  # HERE
        dist.all_reduce(torch.ones(100))
        if (group.rank, step) == (2, AT):
            meter.sync()
        else:
            gather(meter.values, group.world_size)


def ranks():
    return dist.get_rank(), dist.get_world_size()


class Overlap:
    """Starts the communication of a step and waits for it at the next one."""

    def __init__(self, rank, world):
        self.rank, self.world, self.pending = rank, world, {}

    def start(self, name, tensor):
        if name == "grads":
            self.pending[name] = dist.all_reduce(tensor, async_op=True)  # HERE
        else:
            parts = [torch.empty_like(tensor) for _ in range(self.world)]
            self.pending[name] = dist.all_gather(parts, tensor, async_op=True)  # HERE

    def finish(self):
        for name in sorted(self.pending):
            self.pending.pop(name).wait()  # HERE


@planted("collective_mismatch", [1], n=3, marked=True, family="swap", origin="bug reports 2026-11-23")
def test_handles_started_in_other_order():
    """From step 3 on rank 1 starts the gathering of the stats before the all-reduce of the gradients (its tasks come from a queue that is sorted by size), the others the other way round."""
    rank, world = ranks()
    overlap = Overlap(rank, world)
    for step in range(6):
        grads = torch.randn(32)
        stats = torch.randn(64 if step < 3 else 16)
        tasks = [("grads", grads), ("stats", stats)]
        if rank == 1:
            tasks.sort(key=lambda t: t[1].numel())
        for name, tensor in tasks:
            overlap.start(name, tensor)
        grads.mul(0.5).sum()
        overlap.finish()  # HERE


@contextlib.contextmanager
def first_rank_first(rank):
    if rank != 0:
        dist.barrier()  # HERE
    yield
    if rank == 0:
        dist.barrier()


def longest(rows):
    most = torch.tensor(max(map(len, rows)))
    dist.all_reduce(most, op=dist.ReduceOp.MAX)  # HERE
    return int(most)


@planted("collective_mismatch", [0], n=3, marked=True, miss="a turn to come", family="swap", origin="unseen 2026-11-26")
def test_a_reduction_in_the_first_rank_s_turn(group):
    for _ in range(3):
        dist.all_reduce(torch.ones(2))
    with first_rank_first(group.rank):
        longest([[1] * (2 + group.rank)])
    dist.all_reduce(torch.ones(2))


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


@planted(
    "collective_mismatch",
    [3],
    n=4,
    marked=True,
    miss="a method of two classes",
    family="mismatch",
    origin="unseen 2026-11-25",
)
def test_a_rank_with_another_transport(group):
    transport = Sent() if group.rank == 3 else Gathered()
    dist.barrier()
    for _ in range(3):
        transport.pull(torch.ones(8))


class WaysToReduce:
    """Reduces a gradient in one of two ways, of which each rank has found one the faster."""

    def __init__(self) -> None:
        self.how: Callable[[torch.Tensor], None] = self.flat

    def flat(self, gradient: torch.Tensor) -> None:
        dist.all_reduce(gradient)

    def tree(self, gradient: torch.Tensor) -> None:
        dist.reduce(gradient, 0)  # HERE
        dist.broadcast(gradient, 0)


@planted("collective_mismatch", [3], n=4, marked=True, family="mismatch", origin="generated 2026-11-23")
def test_another_way_to_reduce(group):
    reducer = WaysToReduce()
    for step in range(9):
        if step == 4 and group.rank == 3:
            reducer.how = reducer.tree
        reducer.how(torch.ones(1000))


class Registry:
    """Finds the rank that has written the newest snapshot."""

    def __init__(self, folder):
        self.folder = folder

    @functools.lru_cache(maxsize=None)
    def newest(self):
        return max((int(p.stem.split("_")[1]), int(p.stem.split("_")[2])) for p in self.folder.glob("snap_*"))[1]


@planted("collective_mismatch", [0], n=4, marked=True, family="mismatch", origin="bug reports 2026-11-23")
def test_stale_owner_of_snapshot(tmp_path):
    """Rank 0 has cached the owner of the newest snapshot (itself) when it printed it, so it broadcasts from 0 while the others broadcast from the new owner, 3."""
    rank, _ = ranks()
    registry = Registry(tmp_path)
    if rank == 0:
        (tmp_path / "snap_001_0").write_text("{}")
        print("newest snapshot is of rank", registry.newest())
    dist.barrier()
    for step in range(3):
        x = torch.full((4,), float(step))
        dist.all_reduce(x)
    if rank == 3:
        (tmp_path / "snap_002_3").write_text("{}")
    dist.barrier()
    box = [{"step": 2, "by": rank}]
    dist.broadcast_object_list(box, src=registry.newest())  # HERE
    total = torch.tensor([float(box[0]["step"])])
    dist.all_reduce(total)
    dist.barrier()


class ByLength(Sampler):
    """Sorts by length and gives every rank every n-th sample."""

    def __init__(self, lengths, rank, world):
        self.order = sorted(range(len(lengths)), key=lengths.__getitem__)[rank::world]

    def __iter__(self):
        return iter(self.order)

    def __len__(self):
        return len(self.order)


class MoE(nn.Module):
    """One expert per rank; tokens travel to their expert and back."""

    def __init__(self, dim, world):
        super().__init__()
        self.gate, self.expert, self.world = nn.Linear(dim, world), nn.Linear(dim, dim), world

    def forward(self, x):
        route = self.gate(x).argmax(-1)
        order = route.argsort()
        counts = torch.bincount(route, minlength=self.world)
        incoming = torch.empty_like(counts)
        dist.all_to_all_single(incoming, counts)
        mine = x.new_empty(int(incoming.sum()), x.shape[1])
        dist.all_to_all_single(mine, x[order].contiguous(), incoming.tolist(), counts.tolist())
        if len(mine) == 0:
            return x
        back = torch.empty_like(x)
        dist.all_to_all_single(back, self.expert(mine).contiguous(), counts.tolist(), incoming.tolist())  # HERE
        return back[order.argsort()]


@planted("skipped_collective", [2], n=4, marked=True, family="skip", origin="bug reports 2026-11-23")
def test_idle_expert_leaves_early():
    """In step 4 no token is routed to the expert of rank 2, so rank 2 returns before the all-to-all that brings the tokens back."""
    rank, world = ranks()
    torch.manual_seed(0)
    layer = MoE(8, world)
    sampler = ByLength([random.Random(i).randint(1, 50) for i in range(40)], rank, world)
    with torch.no_grad():
        layer.gate.weight.copy_(torch.eye(world, 8) * 10)
        layer.gate.bias.zero_()
        for step, index in enumerate(sampler):
            x = torch.zeros(12, 8)
            for t in range(12):
                x[t, (t + index) % world] = 1.0
            if step >= 4:
                x[:, 2] = -1.0
                x[:, 3] += 0.5
            y = layer(x)  # HERE
            dist.all_reduce(y.mean())


def reduce_and_share(*, skips: bool) -> None:
    dist.all_reduce(torch.ones(2))
    if not skips:
        dist.broadcast(torch.ones(3), src=0)


@planted("skipped_collective", [1], family="skip", origin="review")
def test_the_second_call_of_a_function_is_skipped(group: Group) -> None:
    for step in range(6):
        reduce_and_share(skips=group.rank == 1 and step == AT)


@contextlib.contextmanager
def one_after_the_other(rank):
    if rank != 0:
        dist.barrier()  # HERE
    yield
    if rank == 0:
        dist.barrier()


@planted("skipped_collective", [0], n=3, marked=True, family="skip", origin="unseen 2026-11-26")
def test_the_first_rank_s_turn_is_left_out(group):
    """It has the data already: its counterpart of the others' barrier does not come."""
    known = {"first": 1} if group.rank == 0 else {}
    dist.all_reduce(torch.ones(2))
    if "first" not in known:  # HERE
        with one_after_the_other(group.rank):  # HERE
            known["first"] = 2
    dist.all_reduce(torch.ones(3))


class Cache:
    """A cache with a host tier: what was written is agreed upon by all ranks of a tensor-parallel group."""

    def __init__(self):
        self.under_way = deque()

    def write(self, node, has_room):
        if has_room:
            self.under_way.append(node)

    def check_writes(self):
        if not self.under_way:
            return  # HERE
        done = torch.tensor(len(self.under_way))
        dist.all_reduce(done, op=dist.ReduceOp.MIN)  # HERE
        for _ in range(int(done)):
            self.under_way.popleft()

    def check_loads(self):
        dist.all_reduce(torch.zeros(1))


@planted("skipped_collective", [1], n=4, marked=True, family="skip", origin="public reports 2026-11-25")
def test_nothing_to_check_is_not_agreed_upon(group):
    cache = Cache()
    for step in range(10):
        cache.write(f"node {step}", has_room=(group.rank, step) != (1, 6))
        cache.check_writes()
        if step % 3 == 2:
            cache.check_loads()


class Reducer:
    def __init__(self):
        self.works = []

    def launch(self, parts):
        for part in parts:
            self.works.append(dist.all_reduce(part, async_op=True))  # HERE

    def finish(self):
        while self.works:
            self.works.pop(0).wait()


@planted("skipped_collective", [1], marked=True, family="skip", origin="public reports 2026-11-25")
def test_a_round_of_handles_is_left_out(group):
    reducer = Reducer()
    for step in range(6):
        reducer.launch([] if (group.rank, step) == (1, 2) else [torch.ones(3), torch.ones(5)])
        reducer.finish()
        if step % 2:
            dist.broadcast(torch.ones(3), 0)


def likelihood(rows: torch.Tensor, *, last: bool) -> torch.Tensor:
    top = rows.clone()
    dist.all_reduce(top, op=dist.ReduceOp.MAX)
    total = (rows - top).exp()
    dist.all_reduce(total)
    if not last:
        return total
    picked = rows * 0.5
    dist.all_reduce(picked)  # HERE
    return total + picked


@planted("skipped_collective", [1], n=3, marked=True, family="skip", origin="unseen 2026-11-24")
def test_the_last_of_three_like_calls_is_left_out(group):
    """Each takes the next one's place from then on, with other numbers; the others are left in the last."""
    for step in range(7):
        likelihood(torch.ones(6), last=(group.rank, step) != (1, AT))  # HERE


def is_steady(value: torch.Tensor, before: float) -> bool:
    highest = value.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)  # HERE
    return abs(float(value) - before) < 0.5


@planted("skipped_collective", [2], n=3, marked=True, family="skip", origin="unseen 2026-11-24")
def test_all_stops_at_the_first_that_is_not(group):
    """What `all` goes through has a collective each; gloo aborts a rank over the sizes, so that its counters are not known."""
    values = [torch.ones(1) for _ in range(3)]
    for step in range(7):
        before = 5.0 if (group.rank, step) == (2, AT) else 1.0
        if all(is_steady(value, before) for value in values):  # HERE
            dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(12))


@planted("skipped_collective", [1], n=3, marked=True, family="skip", origin="unseen 2026-11-27")
def test_a_loop_awaits_a_collective_of_its_executor(group):
    """No line of the user's is in the thread that makes the call."""

    async def reduce(total):
        await asyncio.get_running_loop().run_in_executor(None, dist.all_reduce, total)  # HERE

    for step in range(5):
        if (group.rank, step) != (1, 4):
            asyncio.run(reduce(torch.ones(3)))  # HERE
