"""Trainers' callbacks and evaluation; files, processes, signals and a database: programs as users write them, each with a fault after a real bug report.

Written by hands that had not read the rules. A verdict must name a line that is marked with HERE.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time

import torch
import torch.distributed as dist
import torch.nn as nn

from tests_cpu.faults.planting import planted


def where():
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def mlp(width=16, depth=2):
    return nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())])


# trainers: callbacks, early stopping, evaluation, exceptions


class Callback:
    def on_epoch_end(self, trainer):
        pass


class BestMetric(Callback):
    def on_epoch_end(self, trainer):
        if trainer.rank == 0 and trainer.epoch == 2:
            trainer.best = max(trainer.best, trainer.evaluate())  # HERE


class Trainer:
    def __init__(self, callbacks):
        (self.rank, self.world), self.callbacks = where(), callbacks
        self.model, self.epoch, self.best = nn.Linear(4, 1), 0, -1e9

    def evaluate(self):
        score = -self.model(torch.randn(8, 4)).pow(2).mean().detach()
        dist.all_reduce(score)  # HERE
        return score.item() / self.world

    def fire(self, name):
        for callback in self.callbacks:
            getattr(callback, name)(self)

    def fit(self, epochs):
        for self.epoch in range(epochs):
            seed = [self.epoch * 17]
            dist.broadcast_object_list(seed, src=0)  # HERE
            torch.manual_seed(seed[0] + self.rank)
            self.model(torch.randn(8, 4)).mean().backward()
            self.fire("on_epoch_end")


@planted("extra_collective", [0], n=4, marked=True, miss="a count of the rounds")
def test_callback_evaluates_on_main():
    """A callback under `rank == 0` calls evaluate, which reduces the score over all ranks; the others are in the broadcast of the next epoch's seed."""
    trainer = Trainer([Callback(), BestMetric()])
    trainer.fit(5)


class EarlyStopping:
    def __init__(self, patience):
        self.patience, self.best, self.bad = patience, float("inf"), 0

    def should_stop(self, loss):
        self.bad = 0 if loss < self.best else self.bad + 1
        self.best = min(self.best, loss)
        return self.bad >= self.patience


@planted("skipped_collective", [4], n=5, marked=True)
def test_early_stop_by_local_loss():
    """Rank 4 stops early by its own validation loss, which is not reduced, and leaves the loop; the others go on and wait for its gradient."""
    rank, world = where()
    stopper = EarlyStopping(patience=3)
    weight = torch.zeros(6)
    for epoch in range(12):
        grad = torch.randn(6)
        dist.all_reduce(grad)  # HERE
        weight -= 0.1 * grad / world
        validation = 1.0 / (epoch + 1) if rank != 4 else 1.0 + epoch
        if stopper.should_stop(validation):
            break  # HERE
    dist.barrier()  # HERE


def evaluate(model, batches, world):
    outputs = []
    for batch in batches:
        mine = model(batch).detach()
        parts = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(parts, mine)  # HERE
        outputs += parts
    return torch.cat(outputs).mean()


@planted("extra_collective", [2], n=3, marked=True)
def test_eval_remainder_to_last():
    """The remainder of the evaluation set goes to the last rank, which gathers one batch more than the others do."""
    rank, world = where()
    torch.manual_seed(0)
    data, model = torch.randn(28, 8), nn.Linear(8, 2)
    each = len(data) // (world * 4) * 4
    mine = data[rank * each : (rank + 1) * each] if rank < world - 1 else data[rank * each :]
    for epoch in range(2):
        evaluate(model, mine.split(4), world)  # HERE
        dist.barrier()  # HERE


@planted("skipped_collective", [3], n=4, marked=True)
def test_bad_sample_swallowed():
    """Rank 3 catches the exception of a bad sample and goes on with the next, without the all_reduce that the others do for that batch."""
    rank, world = where()
    weight = torch.zeros(5)
    skipped = 0
    for i in range(8):
        record = {"x": torch.randn(5), "y": None if rank == 3 and i == 4 else 1.0}
        try:
            error = record["x"] @ weight - record["y"]  # HERE
            grad = record["x"] * error
            dist.all_reduce(grad)  # HERE
            weight -= 0.01 * grad / world
        except TypeError as e:
            skipped += 1  # HERE
            print(f"rank {rank}: sample {i} left out: {e}")
    gathered = [None] * world
    dist.all_gather_object(gathered, skipped)  # HERE


class TimeBudget:
    def __init__(self, seconds):
        self.end = time.monotonic() + seconds

    def check(self):
        if time.monotonic() > self.end:
            print("time budget is used up, leaving")
            sys.exit(0)  # HERE


@planted("rank_exited", [2], n=4, marked=True)
def test_time_budget_exit():
    """Rank 2 comes to the end of its time budget and calls sys.exit in the middle of the training; the others wait in the reduction."""
    rank, _ = where()
    budget = TimeBudget(1.0 if rank == 2 else 600.0)
    for step in range(40):
        time.sleep(0.05)
        budget.check()  # HERE
        dist.all_reduce(torch.ones(16))  # HERE


# files, processes, signals, data bases


@contextlib.contextmanager
def cache_lock(path):
    with open(path, "a") as f:
        fcntl.flock(f, fcntl.LOCK_EX)  # HERE
        yield
        fcntl.flock(f, fcntl.LOCK_UN)


@planted("lock_deadlock", [1], n=4, marked=True)
def test_flock_around_barrier(tmp_path):
    """Rank 1 builds the cache first and enters the barrier with the file lock still held; the others want the lock before that barrier."""
    rank, _ = where()
    dist.barrier()
    if rank != 1:
        while not (tmp_path / "building").exists():
            time.sleep(0.02)
    with cache_lock(tmp_path / "cache.lock"):  # HERE
        if not (tmp_path / "cache.pt").exists():
            (tmp_path / "building").touch()
            torch.save(torch.arange(100), tmp_path / "cache.pt")
        dist.barrier()  # HERE
    torch.load(tmp_path / "cache.pt")


def acquire_lock_file(path, poll=0.1):
    while True:
        try:
            return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            time.sleep(poll)  # HERE


@planted("sleeping", [0], marked=True)
def test_stale_lock_file(tmp_path):
    """The lock file of a build that was killed is still there, and rank 0 polls for its removal for ever."""
    rank, _ = where()
    lock = tmp_path / "extension.lock"
    if rank == 0:
        child = subprocess.Popen([sys.executable, "-c", f"import os; open({str(lock)!r}, 'w').close(); os._exit(9)"])
        child.wait()
    for _ in range(3):
        dist.all_reduce(torch.ones(4))
    if rank == 0:
        handle = acquire_lock_file(lock)  # HERE
        (tmp_path / "extension.so").touch()
        os.close(handle)
        lock.unlink()
    dist.barrier()


class Tokenise:
    """Runs the tokeniser as a process of its own, and reads its output when it is done."""

    def __init__(self, lines):
        code = f"import sys, time\nfor i in range({lines}): print('token ' * 20, i)\nsys.stdout.flush()"
        self.process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)

    def result(self):
        code = self.process.wait()  # HERE
        assert code == 0
        return self.process.stdout.read().count(b"token")


@planted("child_process", [3], n=4, marked=True)
def test_child_fills_its_pipe():
    """Rank 3's shard is the long one: its child fills the pipe that no rank reads before the wait, and the wait never ends."""
    rank, _ = where()
    for _ in range(3):
        dist.all_reduce(torch.ones(4))
    counter = Tokenise(lines=20_000 if rank == 3 else 40)
    count = torch.tensor([counter.result()])  # HERE
    dist.all_reduce(count)


class RunState:
    def __init__(self):
        self.lock, self.history, self.preempted = threading.Lock(), [], False
        signal.signal(signal.SIGUSR2, self.on_preempt)

    def on_preempt(self, signum, frame):
        with self.lock:  # HERE
            self.preempted = True

    def record(self, step, loss, notice=None):
        with self.lock:
            self.history.append((step, loss))
            if notice is not None:
                notice()  # HERE


@planted("lock_deadlock", [0], n=3, marked=True)
def test_preempt_handler_lock():
    """The preemption signal reaches rank 0 while it holds the lock of its state, and the handler wants the same lock in the same thread."""
    rank, world = where()
    state = RunState()
    for step in range(8):
        loss = torch.rand(1)
        dist.all_reduce(loss)
        scheduler = (lambda: os.kill(os.getpid(), signal.SIGUSR2)) if rank == 0 and step == 5 else None
        state.record(step, loss.item() / world, scheduler)  # HERE


class RunTable:
    def __init__(self, path):
        self.db = sqlite3.connect(path, timeout=3600, isolation_level=None)
        self.db.execute("create table if not exists runs (rank int, epoch int, loss real)")

    def add(self, rank, epoch, loss, commit=True):
        self.db.execute("begin immediate")  # HERE
        self.db.execute("insert into runs values (?, ?, ?)", (rank, epoch, loss))
        if commit:
            self.db.execute("commit")


@planted("lock_deadlock", [1], n=3, marked=True)
def test_sqlite_open_transaction(tmp_path):
    """Rank 1 leaves its transaction open (a commit too few) and goes into the reduction; the others wait for the data base's lock."""
    rank, world = where()
    table = RunTable(tmp_path / "runs.db")
    for epoch in range(4):
        loss = torch.rand(1)
        dist.all_reduce(loss)  # HERE
        for turn in (1, 0, 2):
            if turn == rank:
                table.add(rank, epoch, loss.item() / world, commit=not (rank == 1 and epoch == 2))  # HERE
            if turn == 1:
                dist.barrier()
