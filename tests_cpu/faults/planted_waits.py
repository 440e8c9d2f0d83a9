"""Programs as users write them, after real bug reports: locks, queues, coroutines, children, pipelines, signals, finalizers.

Written by hands that had not read the rules. A verdict must name a line that is marked with HERE.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import fcntl
import json
import logging
import os
import queue
import signal
import subprocess
import threading
import time
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from torch import nn

log = logging.getLogger("trainer")

from tests_cpu.faults.planting import planted

# 9
# A prefetching thread that dies of a record it cannot read, logs that, and never puts the end into its queue. The other
# ranks do not wait for ever: they are in a monitored barrier, which raises after four seconds.


class Prefetcher:
    def __init__(self, records: list[str]) -> None:
        self.records = records
        self.ready: queue.Queue = queue.Queue(maxsize=2)
        self.thread = threading.Thread(target=self.fill, name="prefetch", daemon=True)
        self.thread.start()

    def fill(self) -> None:
        try:
            for record in self.records:
                self.ready.put(torch.tensor(json.loads(record)))  # HERE
            self.ready.put(None)
        except Exception:
            log.exception("prefetching failed")  # HERE

    def __iter__(self):
        while (item := self.ready.get()) is not None:  # HERE
            yield item


@planted("lock_deadlock", [2], n=3, marked=True)
def test_prefetching(group):
    records = [json.dumps([float(i), float(group.rank)]) for i in range(8)]
    if group.rank == 2:
        records[5] = records[5].rstrip("]")  # cut off in the copy to this node
    seen = 0
    for item in Prefetcher(records):  # HERE
        seen += len(item)
        dist.monitored_barrier(timeout=datetime.timedelta(seconds=4))
    assert seen == 16


# 10
# A barrier under a file lock: who comes first waits for the others inside, and they wait for the lock
# (huggingface/datasets PR 547 and ms-swift PR 5763 are about the locks of data sets that ranks share).


@contextlib.contextmanager
def locked(path):
    with open(path, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)  # HERE
        try:
            yield handle
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)


class Vocabulary:
    def __init__(self, folder) -> None:
        self.path = folder / "vocabulary.json"

    def load(self) -> dict[str, int]:
        with locked(self.path.with_suffix(".lock")):  # HERE
            if not self.path.exists():
                self.path.write_text(json.dumps({word: i for i, word in enumerate(["a", "b", "c", "d"])}))
            dist.barrier()  # HERE
            return json.loads(self.path.read_text())


@planted("lock_deadlock", [2], n=3, marked=True)
def test_vocabulary_is_built_once(group, tmp_path):
    dist.barrier()
    time.sleep(0.8 * ((group.rank + 1) % group.world_size))  # spread the load on the file server; rank 2 is first
    words = Vocabulary(tmp_path).load()  # HERE
    assert len(words) == 4
    dist.barrier()


# 11
# A pipeline of four stages; one of them drops a micro-batch in which nothing is left after its filter, and the stages
# behind it wait for the last one.


class Stage:
    def __init__(self, rank: int, size: int, threshold: float) -> None:
        self.rank, self.last, self.threshold = rank, rank == size - 1, threshold

    def receive(self) -> torch.Tensor:
        x = torch.empty(4, 8)
        dist.recv(x, src=self.rank - 1)  # HERE
        return x

    def run(self, micro_batches: list[torch.Tensor]) -> int:
        done = 0
        for micro_batch in micro_batches:
            x = micro_batch if self.rank == 0 else self.receive()  # HERE
            y = torch.where(x > self.threshold, x, 0)
            if not y.any():  # HERE
                continue  # HERE
            if not self.last:
                dist.send(y, dst=self.rank + 1)  # HERE
            done += 1
        return done


THRESHOLDS = [0.0, 0.5, 0.0, 0.0]


@planted("p2p_unmatched", [1], n=4, marked=True)
def test_pipeline_with_a_filter(group):
    micro_batches = [torch.full((4, 8), 0.01 if i == 5 else 1.0 + i) for i in range(8)]
    stage = Stage(group.rank, group.world_size, THRESHOLDS[group.rank])
    done = stage.run(micro_batches)  # HERE
    dist.barrier()
    assert done == 8


# 12
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


@planted("extra_collective", [1], n=2, marked=True)
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


# 13
# A coroutine that was called and never awaited: nobody fills the queue that the main one awaits.


class AsyncShardReader:
    def __init__(self, shard: int, remote: bool) -> None:
        self.shard, self.remote = shard, remote
        self.lines: asyncio.Queue = asyncio.Queue(maxsize=4)

    async def fill(self) -> None:
        for i in range(6):
            await asyncio.sleep(0)
            await self.lines.put(10 * self.shard + i)
        await self.lines.put(None)

    async def read(self) -> list[int]:
        if self.remote:
            self.fill()  # HERE
        else:
            self.filling = asyncio.create_task(self.fill())
        lines = []
        while True:
            line = await self.lines.get()  # HERE
            if line is None:
                return lines
            lines.append(line)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@planted("lock_deadlock", [0], n=3, marked=True)
def test_async_shards(group):
    total = torch.zeros(1)
    for shard in range(4):
        reader = AsyncShardReader(shard, remote=group.rank == 0 and shard == 3)
        lines = asyncio.run(reader.read())  # HERE
        total[0] = len(lines)
        dist.all_reduce(total)
        assert total.item() == 18


# 14
# Popen, a pipe that is not closed, and wait(): the child reads until the end of its input, which does not come.


class ExternalSort:
    def __init__(self, command: list[str], close_input: bool) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.close_input = close_input

    def add(self, words: list[str]) -> None:
        self.process.stdin.write("\n".join(words) + "\n")
        self.process.stdin.flush()

    def finish(self) -> list[str]:
        if self.close_input:
            self.process.stdin.close()
        self.process.wait()  # HERE
        return self.process.stdout.read().split()


@planted("child_process", [1], n=3, marked=True)
def test_external_sort(group):
    sorter = ExternalSort(["sort", "-u"], close_input=group.rank != 1)  # the branch for an old version of the tool
    for step in range(4):
        sorter.add([f"word{(step * 7 + i) % 5}" for i in range(3)])
        dist.barrier()
    words = sorter.finish()  # HERE
    unique: list = [None] * group.world_size
    dist.all_gather_object(unique, words)
    assert unique[0] == unique[2]


# 15
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


@planted("extra_collective", [2], n=3, marked=True)
def test_open_writers(group):
    writers = OpenWriters(limit=3 if group.rank == 2 else 8)  # fewer file handles on this node
    loss = torch.ones(4)
    for step in range(12):
        writers.get(f"shard-{step // 2}").write(f"{step}")  # HERE
        dist.all_reduce(loss)
        loss /= group.world_size


# 16
# A collective in the backward of an autograd function, behind a branch on the data: one rank's batch has no positives
# (pytorch issue 44957: SyncBatchNorm where one rank does not call the module).


class MeanOfGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, grad.contiguous())  # HERE
        return torch.stack(parts).mean(0)


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 8)
        self.classes = nn.Linear(8, 3)
        self.boxes = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, positives: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.trunk(x))
        loss = self.classes(hidden).pow(2).mean()
        if positives.any():  # HERE
            loss = loss + self.boxes(MeanOfGradients.apply(hidden))[positives].pow(2).mean()  # HERE
        return loss


@planted("data_dependent_branch", [3], n=4, marked=True)
def test_detector_without_positives(group):
    torch.manual_seed(0)
    model = Detector()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        generator = torch.Generator().manual_seed(100 * group.rank + step)
        x = torch.randn(16, 8, generator=generator)
        limit = 99.0 if (group.rank, step) == (3, 5) else 0.0  # only background in this batch
        optimizer.zero_grad()
        loss = model(x, x[:, 0] > limit)  # HERE
        loss.backward()  # HERE
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)  # HERE
        optimizer.step()
    assert torch.isfinite(loss)
