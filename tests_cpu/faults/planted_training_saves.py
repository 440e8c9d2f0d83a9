"""Training that saves: checkpoints and samples that one rank makes alone."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from pytest_nsa import fixtures
from tests_cpu.faults.planting import AT, batch, loss_of, net, planted
from tests_cpu.faults.replicas import small_model


class Saver:
    """Saves beside the training, in a thread, which all ranks begin by telling each other the name."""

    def __init__(self) -> None:
        self.around, self.thread = dist.new_group(), threading.Thread()

    def write(self, name: str, until: threading.Event) -> None:
        names: list[object] = [None] * dist.get_world_size()
        dist.all_gather_object(names, name, group=self.around)  # HERE
        until.wait()

    def begin(self, name: str, until: threading.Event) -> None:
        if not self.thread.is_alive():
            self.thread = threading.Thread(target=self.write, args=(name, until), daemon=True)
            self.thread.start()


@planted("skipped_collective", [0], n=3, marked=True, family="skip", origin="generated 2026-11-23")
def test_a_save_while_one_is_under_way(group):
    """The others' threads wait for a save that this rank has not begun; it has gone past the line where they join them."""
    saver, done = Saver(), threading.Event()
    done.set()
    slow = threading.Event()
    for step in range(6):
        dist.all_reduce(torch.ones(1))
        if step % 2:
            saver.begin(f"step{step}", slow if (group.rank, step) == (0, 1) else done)
            if group.rank or step > 1:
                saver.thread.join(None if group.rank else 0.1)
    slow.set()
    saver.thread.join()  # HERE
    dist.barrier()  # HERE


@planted("extra_collective", [1], n=4, marked=True, family="extra", origin="generated 2026-11-23")
def test_a_look_at_a_whole_weight(group):
    """The other ranks of its group are in later rounds, two of them at the end: the last one of all made the call alone."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    data, model = mesh.get_group("data"), mesh.get_group("model")
    whole = [torch.ones(4), torch.ones(4)]
    for step in range(8):
        dist.all_reduce(torch.ones(6), group=data)
        if (group.rank, step) == (1, AT):
            dist.all_gather(whole, torch.ones(4), group=model)  # HERE
    dist.barrier()


@planted("extra_collective", [0], family="extra", origin="held out 2026-11-22")
def test_a_barrier_stands_below_the_saving_of_the_first_rank(ddp: fixtures.DDP) -> None:
    model = ddp.wrap(net())
    is_main = ddp.rank == 0
    for step in range(6):
        loss_of(model, batch(ddp.rank, step)).backward()
        if step == AT and is_main:
            dist.barrier()


def small():
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def labelled_batch(rank, step):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(6, 6, generator=generator), torch.randint(0, 3, (6,), generator=generator)


def save(state, rank):
    if rank == 0:  # HERE
        state.clear()
        dist.barrier()  # HERE


@planted(
    "extra_collective",
    [0],
    n=2,
    marked=True,
    reason="selected by a condition",
    family="extra",
    origin="unseen 2026-11-26",
)
def test_a_barrier_in_the_first_rank_s_branch(group):
    """The other one is in the next step's backward meanwhile."""
    model = DDP(small(), broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        x, y = labelled_batch(group.rank, step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if step == AT:
            save({}, group.rank)  # HERE


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


@planted("extra_collective", [0], n=3, marked=True, family="extra", origin="pytorch#77562")
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


@planted("extra_collective", [3], n=4, marked=True, family="extra", origin="bug reports 2026-11-23")
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


class TimedCheckpoint:
    """Saves when so many seconds have passed by this rank's own clock."""

    def __init__(self, every: float, began: float) -> None:
        self.every, self.last = every, began

    def __call__(self, save: Callable[[], None]) -> None:
        if time.monotonic() - self.last >= self.every:
            self.last = time.monotonic()
            save()


class Fit:
    def __init__(self, checkpoint: TimedCheckpoint) -> None:
        self.model, self.checkpoint = nn.Linear(8, 8), checkpoint

    def save(self) -> None:
        parts: list[object] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, {k: v.clone() for k, v in self.model.state_dict().items()})  # HERE

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.model(torch.randn(4, 8)).pow(2).mean().backward()
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.grad)
            time.sleep(0.02)
            self.checkpoint(self.save)


@planted("extra_collective", [1], n=3, marked=True, family="extra", origin="libraries")
def test_a_checkpoint_by_each_rank_s_own_clock(group):
    cached = 2.5 if group.rank == 1 else 0.0  # its data was in a cache: its training began earlier
    Fit(TimedCheckpoint(every=4.0, began=time.monotonic() - cached)).run(400)


def ranks():
    return dist.get_rank(), dist.get_world_size()


def average_gradients(model):
    flat = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    at = 0
    for p in model.parameters():
        p.grad.copy_(flat[at : at + p.numel()].view_as(p))
        at += p.numel()


class Checkpoints:
    """Every rank has a scratch disk of its own; only the main rank writes."""

    def __init__(self, folder, rank):
        self.path, self.rank = folder / f"scratch{rank}" / "last.pt", rank
        self.path.parent.mkdir()

    def save(self, model, epoch):
        if self.rank == 0:
            torch.save({"model": model.state_dict(), "epoch": epoch}, self.path)

    def resume(self, model):
        if not self.path.exists():
            return 0
        state = torch.load(self.path)
        model.load_state_dict(state["model"])
        start = [state["epoch"] + 1]
        dist.broadcast_object_list(start, src=0)  # HERE
        return start[0]


@planted("extra_collective", [0], n=3, marked=True, family="extra", origin="bug reports 2026-11-23")
def test_only_rank0_finds_checkpoint(tmp_path):
    """After the restart only rank 0 finds the checkpoint on its scratch disk, and broadcasts the epoch; the others find none and go straight to training."""
    rank, _ = ranks()
    model, checkpoints = nn.Linear(4, 4), Checkpoints(tmp_path, rank)

    def train(start, stop):
        for epoch in range(start, stop):
            model.zero_grad()
            model(torch.randn(2, 4)).sum().backward()
            average_gradients(model)
            checkpoints.save(model, epoch)
        dist.barrier()

    train(0, 2)
    first = checkpoints.resume(model)  # HERE
    train(first, 5)


# A scheduler tells one task only that it will be preempted; its handler sets a flag, and that rank alone goes to save
# (pocket-tts PR 277 and ai2cm/ace PR 1407 reduce the flag for this reason).
class Preemption:
    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> Preemption:
        self.previous = signal.signal(signal.SIGUSR2, self.notice)
        return self

    def __exit__(self, *_exc) -> None:
        signal.signal(signal.SIGUSR2, self.previous)

    def notice(self, _number, _frame) -> None:
        self.requested = True


def save_and_requeue(folder, step: int, state: torch.Tensor) -> None:
    torch.save({"step": step, "state": state}, folder / f"preempted-{os.getpid()}.pt")
    dist.barrier()  # HERE


@planted("extra_collective", [1], n=2, marked=True, family="extra", origin="pocket-tts#277")
def test_preemption_notice(group, tmp_path):
    state = torch.ones(32)
    with Preemption() as preemption:
        for step in range(20):
            dist.all_reduce(state)  # HERE
            state /= group.world_size
            if group.rank == 1 and step == 9:
                os.kill(os.getpid(), signal.SIGUSR2)  # from the scheduler
            if preemption.requested:  # HERE
                save_and_requeue(tmp_path, step, state)  # HERE
                break
    assert torch.isfinite(state).all()


# A collective in __del__: it runs where and when a rank's garbage goes (pytorch issue 195500 has such a deleter). The
# cache of one rank is smaller, and drops a writer while the others keep theirs.
class ShardWriter:
    def __init__(self, name: str) -> None:
        self.name, self.lines = name, []

    def write(self, line: str) -> None:
        self.lines.append(line)

    def __del__(self) -> None:
        self.lines.clear()
        dist.barrier()  # HERE


class OpenWriters:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.writers: OrderedDict[str, ShardWriter] = OrderedDict()

    def get(self, name: str) -> ShardWriter:
        if name not in self.writers:
            self.writers[name] = ShardWriter(name)
        self.writers.move_to_end(name)
        while len(self.writers) > self.limit:
            self.writers.popitem(last=False)  # HERE
        return self.writers[name]


@planted("extra_collective", [2], n=3, marked=True, family="extra", origin="pytorch#195500")
def test_open_writers(group):
    writers = OpenWriters(limit=3 if group.rank == 2 else 8)  # fewer file handles on this node
    loss = torch.ones(4)
    for step in range(12):
        writers.get(f"shard-{step // 2}").write(f"{step}")  # HERE
        dist.all_reduce(loss)
        loss /= group.world_size


def where():
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def mlp(width=16, depth=2):
    return nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())])


class Sampler:
    def __init__(self, model, every):
        self.model, self.every = model, every

    def on_step_end(self, rank, step):
        if rank == 0 and step % self.every == self.every - 1:
            with torch.no_grad():
                self.model(torch.randn(1, 16))  # HERE


@planted("extra_collective", [0], n=3, marked=True, family="extra", origin="bug reports 2026-11-23")
def test_fsdp_sample_on_main():
    """Rank 0 alone samples from the sharded model, whose forward gathers the parameters; the others are in the reduction of the loss."""
    rank, _ = where()
    torch.manual_seed(0)
    model = mlp()
    mesh = init_device_mesh("cpu", (3,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer, sampler = torch.optim.SGD(model.parameters(), lr=0.01), Sampler(model, every=4)
    for step in range(8):
        loss = model(torch.randn(4, 16)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sampler.on_step_end(rank, step)  # HERE
        total = loss.detach().clone()
        dist.all_reduce(total)  # HERE


class Checkpointer:
    def __init__(self, folder, rank):
        self.folder, self.rank = folder, rank

    def maybe_save(self, model, step):
        if step == 3 and self.rank == 0:
            dcp.save({"model": model.state_dict()}, checkpoint_id=str(self.folder / f"step{step}"))  # HERE


@planted("extra_collective", [0], n=3, marked=True, family="extra", origin="bug reports 2026-11-23")
def test_dcp_save_by_main(tmp_path):
    """A torch.save habit: dcp.save, which is collective, is called by rank 0 only; the others are in the next step's barrier."""
    rank, _ = where()
    model = DDP(mlp())
    saver = Checkpointer(tmp_path, rank)
    for step in range(6):
        model(torch.randn(4, 16)).sum().backward()
        saver.maybe_save(model.module, step)  # HERE
        dist.barrier()  # HERE
