"""Healthy programs with uneven work: long pauses that recur, expected timeouts, locks that are released late.

Written by hands that had not read the rules.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import random
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from pytest_nsa import check_divergence, world_size
from tests_cpu.faults.replicas import batch_of, small_model


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> float:
    x, y = batch_of(rank, step)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


def compute(seconds: float) -> int:
    """Pure Python for so many seconds of this process's CPU time."""
    until, n = time.process_time() + seconds, 0
    while time.process_time() < until:
        n += sum(i * i for i in range(1000)) % 7
    return n


# 1: the work is uneven, and the same rank is the last in every step.
@world_size(3)
@pytest.mark.timeout(60)
def test_uneven_work(ddp):
    model = ddp.wrap(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(20):
        time.sleep(0.08 * (1 + ddp.rank))  # its images are larger
        assert math.isfinite(train_step(model, optimizer, ddp.rank, step))


# 2: a long pause that recurs: rank 0 writes a checkpoint every few steps, and the others wait in a barrier.
@check_divergence
@world_size(3)
@pytest.mark.timeout(60)
def test_checkpoints_by_rank_0(ddp, tmp_path):
    model = ddp.wrap(small_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(12):
        train_step(model, optimizer, ddp.rank, step)
        if step % 4 == 3:
            if ddp.rank == 0:
                time.sleep(1.6)  # a slow file system
                torch.save(model.module.state_dict(), tmp_path / f"step-{step}.pt")
            dist.barrier()
    assert len(list(tmp_path.glob("step-*.pt"))) == 3


# 3: local steps, then averaging: between two averages the parameters differ, on purpose.
@world_size(3)
@pytest.mark.timeout(60)
def test_local_steps_then_averaging(group):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(24):
        train_step(model, optimizer, group.rank, step)
        time.sleep(0.03 * random.Random(100 * group.rank + step).random() + 0.15)
        if step % 6 == 5:
            for parameter in model.parameters():
                dist.all_reduce(parameter.data)
                parameter.data /= group.world_size
    norm = torch.tensor([p.detach().norm() for p in model.parameters()]).sum()
    norms = [torch.zeros(()) for _ in range(group.world_size)]
    dist.all_gather(norms, norm)
    assert all(torch.allclose(norm, other) for other in norms)


# 4: early stopping, which rank 0 decides and all obey; the ranks leave a loop of thousands of steps together.
@world_size(4)
@pytest.mark.timeout(60)
def test_early_stopping_by_broadcast(group):
    best, patience = math.inf, 0
    stopped_at = None
    for step in range(10_000):
        time.sleep(0.1)
        loss = torch.tensor([max(0.3, 1 / (step + 1)) + group.rank / 100])
        dist.all_reduce(loss)
        if group.rank == 0:
            patience = 0 if loss.item() < best else patience + 1
            best = min(best, loss.item())
        stop = torch.tensor([patience > 30])
        dist.broadcast(stop, src=0)
        if stop.item():
            stopped_at = step
            break
    steps: list = [None] * group.world_size
    dist.all_gather_object(steps, stopped_at)
    assert len(set(steps)) == 1 and stopped_at is not None


# 5: two groups do different things: other collectives, another number of them, at another pace.
@world_size(4)
@pytest.mark.timeout(60)
def test_groups_of_their_own(group):
    trainers, evaluators = dist.new_group([0, 1]), dist.new_group([2, 3])
    if group.rank in (0, 1):
        gradient = torch.ones(64)
        for _ in range(120):
            dist.all_reduce(gradient, group=trainers)
            gradient /= 2
            time.sleep(0.03)
    else:
        for round_ in range(3):
            time.sleep(0.9)
            scores: list = [None, None]
            dist.all_gather_object(scores, {"rank": group.rank, "round": round_}, group=evaluators)
            dist.barrier(group=evaluators)
            assert [score["rank"] for score in scores] == [2, 3]
    dist.barrier()


# 6: a pipeline with bubbles: the last stage waits for the first micro-batch, the first one for the last gradient.
@world_size(4)
@pytest.mark.timeout(60)
def test_pipeline_with_bubbles(group):
    rank, last = group.rank, group.world_size - 1
    micro_batches, batches = 3, 4
    for _ in range(batches):
        for _ in range(micro_batches):
            x = torch.ones(4, 8)
            if rank > 0:
                dist.recv(x, src=rank - 1)
            time.sleep(0.1)
            if rank < last:
                dist.send(x + 1, dst=rank + 1)
        for _ in range(micro_batches):
            gradient = torch.ones(4, 8)
            if rank < last:
                dist.recv(gradient, src=rank + 1)
            time.sleep(0.1)
            if rank > 0:
                dist.send(gradient * 2, dst=rank - 1)
    if rank == 0:
        assert gradient[0, 0] == 2.0**last


# 7: a data loader with workers, whose first batch takes long on one rank.
class ColdShards(Dataset):
    def __init__(self, rank: int) -> None:
        self.rank, self.warm = rank, False

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.warm:
            time.sleep(4.0 if self.rank == 1 else 0.5)  # opens the archive
            self.warm = True
        x, y = batch_of(0, index, rows=1)
        return x[0], y[0]


@check_divergence
@world_size(2)
@pytest.mark.timeout(60)
def test_loader_with_a_cold_start(ddp):
    shards = ColdShards(ddp.rank)
    sampler = DistributedSampler(shards, num_replicas=ddp.world_size, rank=ddp.rank, shuffle=True, seed=5)
    model = ddp.wrap(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    steps = 0
    for x, y in DataLoader(shards, batch_size=4, sampler=sampler, num_workers=2):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        steps += 1
    assert steps == 12


# 8: rank 0 evaluates alone, with the inner module and without a gradient, while the others are in the next step already.
@check_divergence
@world_size(2)
@pytest.mark.timeout(60)
def test_evaluation_by_rank_0(ddp):
    model = ddp.wrap(small_model())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scores = []
    for step in range(10):
        train_step(model, optimizer, ddp.rank, step)
        if step % 5 == 4 and ddp.rank == 0:
            model.eval()
            with torch.no_grad():
                for index in range(8):
                    x, y = batch_of(99, index)
                    scores.append(nn.functional.mse_loss(model.module(x), y).item())
                    time.sleep(0.25)
            model.train()
    dist.barrier()
    assert len(scores) == (16 if ddp.rank == 0 else 0)


# 9: one rank meets a bad batch; all agree on that, raise together, and catch it together.
class BadBatch(Exception):
    pass


def agree_on(problem: str | None, size: int) -> None:
    problems: list = [None] * size
    dist.all_gather_object(problems, problem)
    found = {rank: text for rank, text in enumerate(problems) if text is not None}
    if found:
        raise BadBatch(str(found))


@world_size(3)
@pytest.mark.timeout(60)
def test_bad_batches_are_agreed_on(group):
    skipped = []
    weights = torch.ones(8)
    for step in range(24):
        try:
            problem = None
            try:
                value = torch.tensor(float("nan") if (step % 8, step % 3) == (5, group.rank) else 1.0)
                if not torch.isfinite(value):
                    raise FloatingPointError(f"step {step}")
            except FloatingPointError as error:
                problem = str(error)
            agree_on(problem, group.world_size)
        except BadBatch:
            skipped.append(step)
            time.sleep(0.7)
            continue
        time.sleep(0.08)
        dist.all_reduce(weights)
        weights /= group.world_size
    assert skipped == [5, 13, 21]


# 10: time-outs that are expected: a monitored barrier that one rank does not enter, and a receive that nobody serves,
# both in groups of their own, which are not used afterwards.
@world_size(3)
@pytest.mark.timeout(60)
def test_expected_time_outs(group):
    barrier_group, mail_group = dist.new_group([0, 1, 2]), dist.new_group([0, 1, 2])
    dist.barrier()
    if group.rank == 2:
        time.sleep(3.0)  # busy elsewhere, as the test wants it
    elif group.rank == 0:
        with pytest.raises(RuntimeError, match="monitored|Monitored|Rank 2"):
            dist.monitored_barrier(group=barrier_group, timeout=datetime.timedelta(seconds=1.5))
    else:
        with pytest.raises(RuntimeError):
            dist.monitored_barrier(group=barrier_group, timeout=datetime.timedelta(seconds=2))
    dist.barrier()
    if group.rank == 1:
        work = dist.irecv(torch.empty(2), src=0, group=mail_group)
        with pytest.raises(RuntimeError):
            work.wait(datetime.timedelta(seconds=1.5))
    dist.barrier()


# 11: a lock that a thread releases late, and for which the main thread waits meanwhile.
@world_size(2)
@pytest.mark.timeout(60)
def test_lock_is_released_late(group):
    lock = threading.Lock()
    journal: list[int] = []
    held = threading.Event()

    def write(step: int, seconds: float) -> None:
        with lock:
            held.set()
            time.sleep(seconds)
            journal.append(step)

    for step in range(3):
        held.clear()
        writer = threading.Thread(target=write, args=(step, 2.2 if group.rank == step % 2 else 0.1))
        writer.start()
        held.wait()
        with lock:
            assert journal[-1] == step
        writer.join()
        dist.barrier()
    assert journal == [0, 1, 2]


# 12: work in child processes, on one rank for longer than on the other.
@world_size(2)
@pytest.mark.timeout(60)
def test_work_in_children(group):
    sizes = []
    for part in range(3):
        seconds = 1.5 if group.rank == 1 else 0.2
        program = f"import time; time.sleep({seconds}); print(len(range({part}, 100)))"
        done = subprocess.run(
            [sys.executable, "-S", "-c", program], capture_output=True, text=True, check=True, timeout=30
        )
        sizes.append(int(done.stdout))
        dist.barrier()
    assert sizes == [100, 99, 98]


# 13: gradient accumulation: no_sync for all micro-batches but the last.
@check_divergence
@world_size(3)
@pytest.mark.timeout(60)
def test_accumulation_without_sync(ddp):
    accumulate = 4
    model = ddp.wrap(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for index in range(32):
        x, y = batch_of(ddp.rank, index)
        last = index % accumulate == accumulate - 1
        with contextlib.nullcontext() if last else model.no_sync():
            (nn.functional.mse_loss(model(x), y) / accumulate).backward()
        time.sleep(0.1)
        if last:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


# 14: a rank is done five seconds before the others, who go on among themselves.
@world_size(3)
@pytest.mark.timeout(60)
def test_one_is_done_early(group):
    rest = dist.new_group([1, 2])
    token = torch.tensor([float(group.rank)])
    dist.all_reduce(token)
    assert token.item() == 3
    if group.rank == 0:
        return
    for _ in range(10):
        time.sleep(0.5)
        dist.all_reduce(token, group=rest)
        token /= 2


# 15: DDP with join() and uneven inputs: who has none left shadows the collectives of the others.
@check_divergence
@world_size(3)
@pytest.mark.timeout(60)
def test_join_with_uneven_inputs(ddp):
    model = ddp.wrap(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    steps = 6 + 5 * ddp.rank
    with model.join():
        for step in range(steps):
            train_step(model, optimizer, ddp.rank, step)
            time.sleep(0.25)
    norm = torch.stack([p.detach().norm() for p in model.parameters()])
    norms = [torch.zeros_like(norm) for _ in range(ddp.world_size)]
    dist.all_gather(norms, norm)
    assert all(torch.equal(norm, other) for other in norms)


# 16: four ranks on two cores compute in pure Python, and exchange objects now and then.
@world_size(4)
@pytest.mark.timeout(60)
def test_pure_python_on_few_cores(group):
    total = 0
    for round_ in range(6):
        total += compute(0.25 + 0.1 * ((group.rank + round_) % 4))
        message = [{"round": round_, "from": round_ % 4}] if group.rank == round_ % 4 else [None]
        dist.broadcast_object_list(message, src=round_ % 4)
        assert message[0]["from"] == round_ % 4
    gathered: list | None = [None] * group.world_size if group.rank == 3 else None
    dist.gather_object(total, gathered, dst=3)
    if group.rank == 3:
        assert len(gathered) == 4


@world_size(2)
@check_divergence
def test_a_step_is_left_out_for_its_loss(ddp):
    """A loss that is not finite on one rank: all ranks learn of it, and none of them takes that step, as mixed precision does."""
    torch.manual_seed(0)
    model = ddp.wrap(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        x = torch.full((2, 4), float("inf") if ddp.rank == 1 and step == 3 else 0.5)
        model(x).sum().backward()
        fine = torch.tensor(float(all(bool(p.grad.isfinite().all()) for p in model.parameters())))
        torch.distributed.all_reduce(fine, op=torch.distributed.ReduceOp.MIN)
        if fine:
            optimizer.step()
    assert all(bool(p.isfinite().all()) for p in model.parameters())
