"""Programs in which a call, message, key or batch is left out."""

from __future__ import annotations

import asyncio
import contextlib
import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

from pytest_nsa import fixtures
from pytest_nsa.fixtures import FSDP, Group
from tests_cpu.faults.planting import AT, Net, batch, loss_of, net, planted


@planted(3, rank=1)
def test_a_loop_awaits_a_collective_of_its_executor(group, culprit):
    """No line of the user's is in the thread that makes the call."""

    async def reduce(total):
        await asyncio.get_running_loop().run_in_executor(None, dist.all_reduce, total)  # HERE

    for step in range(5):
        if (group.rank, step) != (culprit, 4):
            asyncio.run(reduce(torch.ones(3)))  # HERE


@planted(2, rank=1)
def test_skips_a_functional_collective(group: Group, culprit: int) -> None:
    from torch.distributed import _functional_collectives as functional

    for step in range(6):
        if not (group.rank == culprit and step == AT):
            functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD) + 1
        dist.barrier()


@planted(2, rank=1)
def test_a_monitored_barrier_complains(group: Group, culprit: int) -> None:
    from datetime import timedelta

    dist.all_reduce(torch.ones(1))
    if group.rank != culprit:
        dist.monitored_barrier(timeout=timedelta(seconds=1))


@planted(3, rank=0)
def test_a_call_that_is_refused(group, culprit):
    """Too few tensors to scatter: the rank that has them gets an exception, and goes on; the others wait."""
    given = torch.empty(1)
    for step in range(6):
        whole = [torch.ones(1)] * (2 if (group.rank, step) == (culprit, AT) else 3)
        try:
            dist.scatter(given, whole if group.rank == 0 else None, 0)  # HERE
        except (RuntimeError, ValueError):
            given = torch.zeros(1)
        dist.all_reduce(given)


@planted(2, rank=1)
def test_a_plan_is_not_shared_and_its_place_is_taken(group, culprit):
    for step in range(5):
        if (group.rank, step) != (culprit, 2):
            plan = [{"step": step} if group.rank == step % 2 else None]
            dist.broadcast_object_list(plan, src=step % 2)  # HERE
        mine = [None]
        dist.scatter_object_list(mine, [[r, step] for r in range(2)] if group.rank == 0 else None, src=0)
        dist.all_reduce(torch.ones(1))


@planted(4, rank=3)
def test_a_rank_leaves_a_size_out_of_a_list_of_sizes(group, culprit):
    """One line, and a size of its own in each round."""
    for rows in (8, 12, 5, 9, 16):
        mine = rows // 4 + (group.rank < rows % 4)
        if mine == 1 and group.rank == culprit:
            continue
        whole = [torch.empty((rows + 3) // 4 * 6) for _ in range(4)]
        dist.all_gather(whole, torch.ones((rows + 3) // 4 * 6))  # HERE
    dist.barrier()


def mean_of(values):
    if not values:  # HERE
        return 0.0
    total = torch.tensor([sum(values), float(len(values))])
    dist.all_reduce(total)  # HERE
    return float(total[0] / total[1])


@planted(2, rank=0)
def test_a_rank_without_values_returns_early_and_asserts(group, culprit):
    assert mean_of([] if group.rank == culprit else [1.0, 2.0]) == 1.5


@planted(4, rank=1)
def test_a_rank_that_is_selected_asserts_in_a_finally(group, culprit):
    x = torch.ones(1)
    try:
        if group.rank != culprit:
            dist.all_reduce(x)  # HERE
    finally:
        assert x.item() == 4


@pytest.fixture
def collected():
    """What a test collects has all ranks' shares."""
    found: list[float] = []
    yield found
    assert found == [2.0]


@planted(2, rank=1)
def test_a_fixture_asserts_what_a_rank_has_not_reduced(group, collected, culprit):
    x = torch.ones(1)
    if group.rank != culprit:
        dist.all_reduce(x)  # HERE
    collected.append(x.item())


class Remembers(nn.Module):
    """Reduces in its forward, unless it remembers what came of it."""

    def __init__(self, *, remembers: bool) -> None:
        super().__init__()
        self.linear, self.remembers = nn.Linear(8, 8), remembers
        self.memory: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x).relu()
        if self.memory is None or not self.remembers:
            self.memory = h.detach().sum(0)
            dist.all_reduce(self.memory)
        return (h * self.memory).tanh()


@planted(2, rank=0)
def test_a_recomputation_does_not_reduce_again(ddp: fixtures.DDP, culprit: int) -> None:
    layer = Remembers(remembers=ddp.rank == culprit)
    for step in range(2):
        layer.memory = None
        torch.utils.checkpoint.checkpoint(layer, batch(ddp.rank, step), use_reentrant=False).sum().backward()
        dist.barrier()


def ranks():
    return dist.get_rank(), dist.get_world_size()


def ring_attention(q, k, v, *, first_leaves):
    """Sequence parallel causal attention: keys and values go round the ring."""
    rank, world = ranks()
    if rank == 0 and first_leaves:
        # causal: the first block of the sequence sees only itself
        return torch.softmax(q @ k.T, -1) @ v
    scores, values, kv = [q @ k.T], [v], torch.stack([k, v])
    for hop in range(1, world):
        incoming = torch.empty_like(kv)
        out = dist.isend(kv, (rank + 1) % world)  # HERE
        dist.recv(incoming, (rank - 1) % world)  # HERE
        out.wait()  # HERE
        kv = incoming
        if (rank - hop) % world < rank:
            scores.append(q @ kv[0].T)
            values.append(kv[1])
    return torch.softmax(torch.cat(scores, -1), -1) @ torch.cat(values)


@planted(4)
def test_ring_attention_first_block_leaves(faulty):
    """Rank 0 returns early since its causal block needs no other, so it neither passes its keys on to rank 1 nor takes those of rank 3."""
    rank, _ = ranks()
    torch.manual_seed(rank)
    block = torch.randn(8, 4)
    for warm in range(3):
        local = torch.softmax(block @ block.T, -1) @ block
        dist.all_reduce(local)
    out = ring_attention(block, block, block, first_leaves=faulty)  # HERE
    dist.all_reduce(out)


@planted(4, rank=2)
def test_a_stage_sends_nothing_for_an_empty_part(group, culprit):
    """All others have ended by then."""
    for part in range(8):
        x = torch.ones(8)
        if group.rank > 0:
            dist.recv(x, group.rank - 1)
        if group.rank == culprit and part == AT:
            x.zero_()
        if group.rank < 3 and x.any():
            dist.send(x, group.rank + 1)  # HERE


@planted(4, rank=3)
def test_a_worker_has_had_enough(group, culprit):
    """It sends its result while the first rank still has work for it; the other workers wait for theirs."""
    for batch in range(2):
        if group.rank == 0:
            for item in range(15):
                dist.send(torch.tensor([item]), 1 + item % 3)  # HERE
            for worker in (1, 2, 3):
                dist.recv(torch.empty(1), worker)
        else:
            for done in range(5):
                dist.recv(torch.empty(1, dtype=torch.long), 0)  # HERE
                if (group.rank, batch, done) == (culprit, 1, 2):
                    break  # HERE
            dist.send(torch.ones(1), 0)  # HERE


def store_of_all() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


@planted(3)
def test_a_teacher_that_publishes_only_what_is_better(group, faulty):
    best = 0.0
    for number, score in enumerate([0.2, 0.4, 0.3 if faulty else 0.5]):
        if group.rank:
            store_of_all().wait([f"teacher/{number}"])
        elif score > best:
            best = score
            store_of_all().set(f"teacher/{number}", "1")  # HERE


@planted(4, rank=2)
def test_a_rank_that_has_left_waits_for_a_key(group, culprit):
    """One rank still reduces over all ranks, while the others leave out the one that has left and waits to be asked back."""
    all_ranks, without = dist.new_group(), dist.new_group([0, 1, 2])
    for step in range(8):
        if group.rank == 3 and step == 4:
            store_of_all().wait(["back/3"])
            break
        knows = step >= 4 and group.rank != culprit
        dist.all_reduce(torch.ones(4), group=without if knows else all_ranks)  # HERE
    if group.rank == 0:
        store_of_all().set("back/3", "1")


@planted(3, rank=0)
def test_a_reader_of_keys_leaves_the_reduction_out(group, culprit):
    store = dist.PrefixStore("meta", dist.distributed_c10d._get_default_store())
    store.set_timeout(timedelta(minutes=20))
    for step in range(6):
        store.set(f"{step}/of/{group.rank}", "1")
        for rank in range(3):
            store.get(f"{step}/of/{rank}")
        if (group.rank, step) != (culprit, AT):
            dist.all_reduce(torch.ones(1))  # HERE


@planted(2, rank=1)
def test_the_other_leads_for_the_first_time_and_sets_nothing(group, culprit):
    """Only the rank that waits has set such a key, when it led; there is no third one."""
    store = dist.PrefixStore("lead", dist.distributed_c10d._get_default_store())
    for step in range(5):
        if step % 2 != group.rank:
            store.wait([f"round/{step}"], timedelta(minutes=20))  # HERE
        elif (group.rank, step) != (culprit, 1):
            store.set(f"round/{step}", "1")  # HERE
        dist.all_reduce(torch.ones(1))


def where():
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class StoreBarrier:
    def __init__(self, path, world):
        self.store, self.world, self.round = dist.FileStore(str(path / "sync"), world), world, 0

    def wait(self):
        self.round += 1
        if self.store.add(f"in/{self.round}", 1) == self.world:
            self.store.set(f"go/{self.round}", "1")  # HERE
        self.store.wait([f"go/{self.round}"])  # HERE


@planted(3, rank=2)
def test_store_barrier_no_shard(tmp_path, culprit):
    """Rank 2 has no shard to write and returns before the store's barrier; the others wait there for its arrival."""
    rank, world = where()
    barrier = StoreBarrier(tmp_path, world)

    def export(epoch):
        rows = [] if rank == culprit and epoch == 3 else list(range(4))
        if not rows:
            return  # HERE
        (tmp_path / f"shard-{rank}-{epoch}").write_text(str(rows))
        barrier.wait()  # HERE

    for epoch in range(5):
        dist.all_reduce(torch.ones(2))  # HERE
        export(epoch)
    dist.barrier()


@planted(2, rank=1)
def test_two_forwards_a_step_and_fewer_steps(group, culprit):
    """Every other forward has no backward of its own: that is this program's habit."""
    model = nn.Linear(5, 2)
    for _ in range(6 if group.rank == culprit else 7):
        guess = model(torch.randn(4, 5)).softmax(-1)
        (model(torch.randn(4, 5)).square().mean() - guess.log().mean()).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)  # HERE
    weights: list[object] = [None, None]
    dist.all_gather_object(weights, group.rank)


@planted(3, rank=1)
def test_join_does_not_shadow_metrics(culprit):
    """Rank 1 has fewer inputs and leaves the loop into DDP's join, which shadows the gradients' all-reduce but not the gathering of the metrics that the others do by hand."""
    rank, world = ranks()
    torch.manual_seed(0)
    model = DDP(nn.Linear(10, 2))
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = [torch.randn(4, 10) for _ in range(4 if rank == culprit else 7)]
    history = []
    with model.join():  # HERE
        for x in batches:  # HERE
            loss = model(x).square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
            seen = [None] * world
            dist.all_gather_object(seen, float(loss.detach()))  # HERE
            history.append(sum(seen) / world)
    assert len(history) >= 4


@planted(3, rank=1)
def test_a_mean_is_reduced_within_a_join(group, culprit):
    model = DDP(nn.Linear(5, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model]):  # HERE
        for _ in range(3 if group.rank == culprit else 6):
            loss = model(torch.randn(4, 5)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            dist.all_reduce(loss.detach().clone())  # HERE


@planted(2, rank=0)
def test_fewer_batches_and_nothing_after(ddp: fixtures.DDP, culprit: int) -> None:
    model = ddp.wrap(net())
    for step in range(4 if ddp.rank == culprit else 6):
        loss_of(model, batch(ddp.rank, step)).backward()


def train_on(loader: DataLoader, model: nn.Module) -> None:
    for x in loader:
        model(x).square().mean().backward()  # HERE


def validate(model: nn.Module) -> None:
    with torch.no_grad():
        loss = model(torch.ones(4, 6)).mean()
    dist.all_reduce(loss)


@planted(2, rank=0)
def test_a_validation_follows_fewer_batches(group, culprit):
    """gloo aborts the rank with the smaller buffer, which leaves no counters: the loader that ran out shows which rank is ahead."""
    model = DDP(nn.Linear(6, 3))
    loader = DataLoader(torch.randn(64 if group.rank == culprit else 80, 6), batch_size=8)
    for _ in range(2):
        train_on(loader, model)
        validate(model.module)


@planted(2, rank=0)
def test_a_step_s_gradients_are_left_out_and_the_log_goes_on(group, culprit):
    step = 0
    for _epoch in range(3):
        for _batch in range(3):
            if (group.rank, step) != (culprit, 4):
                dist.all_reduce(torch.ones(4))  # HERE
            if step % 2 == 0:
                dist.all_reduce(torch.ones(1))
            step += 1
        dist.barrier()


def train_step(parts):
    for part in parts:
        part.grad = torch.ones_like(part)
        dist.all_reduce(part.grad)  # HERE


@planted(4)
def test_a_stream_of_fewer_files_ends_sooner(group, faulty):
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    files = range(11 if faulty else 12)
    for _epoch in range(2):
        for _x in range(4 * len(files[group.rank :: group.world_size])):  # HERE
            model(torch.randn(2, 8)).sum().backward()
            train_step(list(model.parameters()))
            optimizer.step()
            optimizer.zero_grad()
        dist.all_gather_object([None] * group.world_size, group.rank)


def inner(model: nn.Module) -> Net:
    """What DDP wraps."""
    assert isinstance(model.module, Net)
    return model.module


@planted(2, rank=1)
def test_an_exception_in_forward_is_swallowed(ddp: fixtures.DDP, culprit: int) -> None:
    model = ddp.wrap(net())
    for step in range(6):
        if step == AT and ddp.rank == culprit:
            inner(model).blocks[1].fault = lambda: 1 / 0
        with contextlib.suppress(ZeroDivisionError):
            loss_of(model, batch(ddp.rank, step)).backward()
        inner(model).blocks[1].fault = lambda: None


@planted(4, rank=2)
def test_a_batch_with_nan_is_skipped_of_four(ddp: fixtures.DDP, culprit: int) -> None:
    model = ddp.wrap(net())
    for step in range(6):
        x = batch(ddp.rank, step) * (float("nan") if step == AT and ddp.rank == culprit else 1)
        loss = loss_of(model, x)
        if not torch.isnan(loss):
            loss.backward()


@planted(2, rank=1)
def test_no_sync_on_one_rank(ddp: fixtures.DDP, culprit: int) -> None:
    model = ddp.wrap(net())
    for step in range(6):
        context = model.no_sync() if step == AT and ddp.rank == culprit else contextlib.nullcontext()  # type: ignore[operator]
        with context:
            loss_of(model, batch(ddp.rank, step)).backward()


@planted(3, rank=1)
def test_an_empty_batch_is_skipped_under_fsdp(fsdp: FSDP, culprit: int) -> None:
    model = fsdp.wrap(net())
    for step in range(6):
        x = batch(fsdp.rank, step)[: 0 if (step, fsdp.rank) == (AT, culprit) else 4]
        if not len(x):
            continue
        loss_of(model, x).backward()
