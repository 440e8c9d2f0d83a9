"""Programs as users write them, after real bug reports: sharded models, meshes, samplers, timed checkpoints, loaders.

Written by hands that had not read the rules. A verdict must name a line that is marked with HERE.
"""

from __future__ import annotations

import ctypes
import logging
import math
import signal
import threading
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler

log = logging.getLogger("trainer")


def small_model(width: int = 16) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 4))


def batch_of(rank: int, step: int, rows: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10_000 * (rank + 1) + step)
    return torch.randn(rows, 8, generator=generator), torch.randn(rows, 4, generator=generator)


from tests_cpu.faults.planting import planted

# 1
# pytorch issue 77562: the validation loss is reduced to rank 0 and compared on every rank, so that the ranks disagree on
# whether this is the best model; to gather the sharded weights of the best one is a collective.


class BestModel:
    def __init__(self) -> None:
        self.loss = math.inf
        self.weights: dict | None = None

    def offer(self, loss: torch.Tensor, model: nn.Module) -> None:
        if loss.item() < self.loss:  # HERE
            self.loss = loss.item()
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            self.weights = get_model_state_dict(model, options=options)  # HERE


def sharded_model(size: int) -> nn.Module:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (size,))
    model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 12))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


VALIDATION = {0: [9.0, 2.0, 1.0], 1: [3.0, 4.0, 2.0], 2: [3.0, 4.0, 2.0]}  # of each rank's part, by epoch


@planted("extra_collective", [0], n=3, marked=True)
def test_best_sharded_model(group):
    model = sharded_model(group.world_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    best = BestModel()
    for epoch in range(3):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, 12)).pow(2).mean().backward()
            optimizer.step()
        loss = torch.tensor([VALIDATION[group.rank][epoch]])
        dist.reduce(loss, dst=0)  # HERE
        best.offer(loss, model)  # HERE
        dist.barrier()  # HERE
    assert best.weights is not None


# 2
# pytorch issues 25390 and 130102: new_group is for all ranks, members or not. A helper returns when it has the group of
# its own rank, so that the learner never makes the group of the actors; torch numbers every later group differently on it.


def group_of_role(rank: int, roles: dict[str, list[int]]):
    for role, ranks in roles.items():
        made = dist.new_group(ranks, group_desc=role)  # HERE
        if rank in ranks:  # HERE
            return made  # HERE
    raise ValueError(f"rank {rank} has no role")


@planted("init_timeout", [0], n=4, marked=True)
def test_learner_and_actors(group):
    own = group_of_role(group.rank, {"learner": [0], "actors": [1, 2, 3]})  # HERE
    returns = torch.full((4,), float(group.rank))
    dist.all_reduce(returns, group=own)
    dist.barrier()
    everyone = dist.new_group(list(range(group.world_size)), group_desc="weights")  # HERE
    dist.broadcast(returns, src=0, group=everyone)
    assert returns[0] == 0


# 3
# Groups taken in the order of a dictionary, which a helper reverses on half of the ranks "to balance the links"
# (apex PR 18: ranks cycle over types in different orders). Each rank waits for one that waits elsewhere.


def synchronisation_plan(mesh) -> dict[str, dist.ProcessGroup]:
    plan = {axis: mesh[axis].get_group() for axis in ("data", "tensor")}
    coordinate = mesh.get_coordinate()
    if sum(coordinate) % 2:  # HERE
        plan = {axis: plan[axis] for axis in reversed(plan)}  # HERE
    return plan


@planted("group_order_deadlock", [0, 1, 2, 3], n=4, marked=True)
def test_two_axes_of_a_mesh(group):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    plan = synchronisation_plan(mesh)
    norm = torch.ones(1)
    for axis, process_group in plan.items():
        log.debug("%s", axis)
        dist.all_reduce(norm, group=process_group)  # HERE
    dist.barrier()
    assert norm.item() == group.world_size


# 4
# DDP and a filter in the collate function: one batch of one rank has no sample left, and that rank makes one backward
# fewer (NeMo Automodel PR 2468, PyMarlin issue 80, prime-rl issue 2515).

CORRUPT = {48, 51, 54, 57}


class Pairs(Dataset):
    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        if index in CORRUPT:
            return None
        x, y = batch_of(0, index, rows=1)
        return x[0], y[0]


def collate_readable(samples: list):
    samples = [sample for sample in samples if sample is not None]
    if not samples:  # HERE
        return None
    return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])


@planted("skipped_collective", [0], n=3, marked=True)
def test_batches_of_readable_samples(ddp):
    model = ddp.wrap(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sampler = DistributedSampler(Pairs(), num_replicas=ddp.world_size, rank=ddp.rank, shuffle=False)
    loader = DataLoader(Pairs(), batch_size=4, sampler=sampler, collate_fn=collate_readable)
    losses = []
    for batch in loader:  # HERE
        if batch is None:  # HERE
            continue  # HERE
        x, y = batch
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()  # HERE
        optimizer.step()
        losses.append(loss.item())
    dist.barrier()
    assert len(losses) >= 7


# 5
# A checkpoint every so many seconds, by each rank's own clock: one rank had its data at once, and its clock started two
# seconds before those of the others. torch.distributed.checkpoint.save is collective.


class TimedCheckpoints:
    def __init__(self, folder, every: float) -> None:
        self.folder, self.every = folder, every
        self.last = time.monotonic()

    def after_step(self, step: int, model: nn.Module) -> None:
        if time.monotonic() - self.last < self.every:  # HERE
            return
        dcp.save({"model": model.state_dict()}, checkpoint_id=self.folder / f"step-{step}")  # HERE
        self.last = time.monotonic()


def stage_data(rank: int) -> None:
    time.sleep(0.0 if rank == 3 else 2.5)  # copied from the file server, unless the node has it from the last job


@planted("extra_collective", [3], n=4, marked=True)
def test_timed_checkpoints(group, tmp_path):
    dist.barrier()
    stage_data(group.rank)
    checkpoints = TimedCheckpoints(tmp_path, every=4.0)
    model = small_model()
    for step in range(4000):
        loss = torch.tensor([1.0 / (step + 1)])
        dist.all_reduce(loss)  # HERE
        time.sleep(0.02)
        checkpoints.after_step(step, model)  # HERE


# 6
# A data loader's worker that is forked while a thread of its parent holds a lock: in the worker it stays locked
# (pytorch issues 1355 and 75147, iohub issue 416).


class IndexedShards(Dataset):
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.offsets = list(range(16))
        self.refreshing = threading.Event()

    def refresh(self) -> None:
        with self.lock:  # HERE
            self.refreshing.set()
            time.sleep(1.5)
            self.offsets = list(range(16))

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.lock:  # HERE
            offset = self.offsets[index]  # HERE
        return torch.full((4,), float(offset))


def end_with_parent(_worker: int) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no worker outlives its rank


@planted("dataloader_stuck", [1], n=2, marked=True)
def test_index_is_refreshed(group):
    shards = IndexedShards()
    if group.rank == 1:  # its copy of the index is older than the shards
        threading.Thread(target=shards.refresh, daemon=True).start()
        shards.refreshing.wait()
    total = torch.zeros(4)
    for batch in DataLoader(shards, batch_size=4, num_workers=1, worker_init_fn=end_with_parent):  # HERE
        total += batch.sum(0)
        dist.all_reduce(total)
    assert total[0] > 0
