"""Ranks that go on, and what they went on from: a `Join`, another's turn, a stream without an end, a step that others have left.

After sets that were written without knowing the rules. HERE marks the lines that a verdict may name.
"""

from __future__ import annotations

import contextlib
import os
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

from tests_cpu.faults.planting import AT, planted


@planted("skipped_collective", [1], n=3, marked=True, reason="at the end of a `Join`", miss="the end of a Join")
def test_a_mean_is_reduced_within_a_join(group):
    model = DDP(nn.Linear(5, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model]):  # HERE
        for _ in range(3 if group.rank == 1 else 6):
            loss = model(torch.randn(4, 5)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            dist.all_reduce(loss.detach().clone())  # HERE


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


@planted("collective_mismatch", [0], n=3, marked=True, miss="a turn to come")
def test_a_reduction_in_the_first_rank_s_turn(group):
    for _ in range(3):
        dist.all_reduce(torch.ones(2))
    with first_rank_first(group.rank):
        longest([[1] * (2 + group.rank)])
    dist.all_reduce(torch.ones(2))


class Samples:
    """The samples of a part, again and again."""

    def __init__(self, part):
        self.part, self.epoch = part, 0

    def __iter__(self):
        while True:
            yield from self.part
            self.epoch += 1

    def from_number(self, number):
        samples = iter(self)
        for sample in samples:  # HERE
            if sample >= number:  # HERE
                return samples


@planted("infinite_loop", [1], n=2, marked=True, reason="from a generator without an end")
def test_a_sample_that_another_part_has(group):
    part = range(500, 600) if group.rank == 0 else range(0, 500, 2)
    samples = Samples(part).from_number(540)
    for _ in range(3):
        dist.all_reduce(torch.tensor(next(samples)))


class Counted:
    """Reduces its counts when so many samples have come."""

    def __init__(self, every):
        self.every, self.seen, self.counts = every, 0, torch.zeros(2, 8, dtype=torch.float64)

    def add(self, number):
        self.seen += number
        if self.seen >= self.every:  # HERE
            self.seen -= self.every
            dist.all_reduce(self.counts.clone())  # HERE


@planted("extra_collective", [1], n=3, marked=True, miss="a step that was left")
def test_counts_are_due_by_a_rank_s_own_samples(group):
    """gloo ends the others over the sizes; what tells is that this rank has made the step's reduction, and they the next one's."""
    model = DDP(nn.Linear(5, 20))
    optimizer, counted = torch.optim.SGD(model.parameters(), lr=0.1), Counted(64)
    for _ in range(10):
        size = 20 if group.rank == 1 else 16
        loss = model(torch.randn(size, 5)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        counted.add(size)


class Stage:
    """A pipeline's stage that computes nothing: as many forwards as there are parts, then as many backwards."""

    def __init__(self, rank, size):
        self.before, self.after = (r if 0 <= r < size else None for r in (rank - 1, rank + 1))

    def run(self, parts):
        h = torch.ones(12)
        for _ in range(parts):
            if self.before is not None:
                dist.recv(h, self.before)  # HERE
            if self.after is not None:
                dist.send(h, self.after)
        for _ in range(parts):
            if self.after is not None:
                dist.recv(h, self.after)  # HERE
            if self.before is not None:
                dist.send(h, self.before)


@planted("p2p_unmatched", [2], n=4, marked=True)
def test_one_stage_has_not_come_to_more_parts(group):
    """Its neighbours have gone on otherwise than in the rounds before, and so has every rank but this one."""
    stage = Stage(group.rank, group.world_size)
    for step in range(8):
        stage.run(4 if step >= (6 if group.rank == 2 else 4) else 2)


class Films(Dataset):
    def __init__(self, rank):
        self.rank = rank

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if self.rank == 2 and index == 21:
            os.kill(os.getpid(), signal.SIGKILL)  # HERE
        return torch.full((5,), float(index))


@planted("dataloader_stuck", [2], n=3, marked=True)
def test_a_worker_is_killed_while_its_rank_trains(group):
    """torch raises for it in whatever line the rank is at."""
    model = DDP(nn.Linear(5, 2))
    for x in DataLoader(Films(group.rank), batch_size=4, num_workers=2):  # HERE
        model(x).sum().backward()


def mesh_of(size, width):
    sizes = [n for n in (size // width, width) if n > 1]
    return init_device_mesh("cpu", tuple(sizes), mesh_dim_names=("rows", "columns")[: len(sizes)])  # HERE


@planted("init_timeout", [3], n=4, marked=True, reason="rank 3 did not make group")
def test_one_rank_makes_a_mesh_without_columns(group):
    mesh = mesh_of(group.world_size, 1 if group.rank == 3 else 2)
    for name in mesh.mesh_dim_names:
        dist.all_reduce(torch.ones(4), group=mesh.get_group(name))


class Narrow(nn.Module):
    """Has no memory for long rows."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 30), nn.Linear(30, 6)

    def forward(self, x):
        h = self.first(x)
        if len(x) > 50:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
        return self.last(h)


@planted("skipped_collective", [1], n=3, marked=True, reason="forward aborted by a swallowed exception")
def test_the_last_batch_finds_no_memory(group):
    """No forward comes after the one that was aborted: it is known when it happens."""
    model = DDP(Narrow())
    for step in range(6):
        try:
            x = torch.randn(60 if group.rank == 1 and step == 5 else 8, 6)
            model(x).sum().backward()  # HERE
        except RuntimeError as error:
            print(f"step {step} is left out: {error}")
    dist.all_reduce(torch.ones(2, dtype=torch.float64))


class Warmed(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.top = nn.Linear(6, 16), nn.Linear(16, 3)
        self.base.requires_grad_(False)

    def forward(self, x):
        return self.top(self.base(x).relu())


@planted("collective_mismatch", [2], n=3, marked=True)
def test_one_rank_trains_its_base_sooner(group):
    """Parameter by parameter, each of a size of its own: one that no round had is no call of a later round."""
    torch.manual_seed(1)
    model = Warmed()
    for step in range(7):
        model.base.requires_grad_(step >= (AT if group.rank == 2 else 6))  # HERE
        model.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)  # HERE


@planted("extra_collective", [0], n=2, marked=True)
def test_a_sample_is_drawn_on_one_rank_under_fsdp(group):
    """Its gathers meet those of the other's next step for a while."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(1, 9):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 4 == 0 and group.rank == 0:  # HERE
            with torch.no_grad():
                for _ in range(3):
                    model(torch.randn(1, 8))  # HERE
