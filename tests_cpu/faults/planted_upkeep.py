"""Averages, schedulers, resuming; retries and timeouts; context managers and generators: programs as users write them, each with a fault after a real bug report.

Written by hands that had not read the rules. A verdict must name a line that is marked with HERE.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import io
import logging
import socket
import struct
import threading
import time

import torch
import torch.distributed as dist
from torch import nn

from tests_cpu.faults.planting import planted


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


# EMA, schedulers, resume


class EMA:
    def __init__(self, model, every):
        self.shadow = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        self.every, self.updates = every, 0

    def update(self, model):
        self.updates += 1
        now = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        self.shadow.lerp_(now, 0.1)
        if self.updates % self.every == 0:
            dist.broadcast(self.shadow, src=0)  # HERE


@planted("skipped_collective", [2], n=3, marked=True)
def test_ema_counter_lags():
    """Rank 2 alone meets an infinite gradient in step 2 and skips that update, so its EMA counter is one behind and it does not join the EMA broadcast of step 4."""
    rank, _ = ranks()
    torch.manual_seed(0)
    model = nn.Linear(7, 3)
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    ema = EMA(model, every=5)
    for step in range(15):
        opt.zero_grad()
        scale = float("inf") if (rank, step) == (2, 2) else 1.0
        (model(torch.randn(4, 7)).mean() * scale).backward()
        found_inf = not all(torch.isfinite(p.grad).all() for p in model.parameters())
        for p in model.parameters():
            p.grad.nan_to_num_(0.0, 0.0, 0.0)
        average_gradients(model)
        if not found_inf:
            opt.step()
            ema.update(model)  # HERE


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


@planted("extra_collective", [0], n=3, marked=True)
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


# retry, timeouts, asyncio, sockets


def with_backoff(call, first=0.5, factor=2.0):
    delay = first
    while True:
        try:
            return call()
        except OSError as error:
            logging.getLogger("storage").info("%s, again in %s s", error, delay)
            time.sleep(delay)  # HERE
            delay *= factor


@planted("sleeping", [6], n=7, marked=True)
def test_backoff_outlives_barrier(tmp_path):
    """Rank 6 sleeps ever longer in a retry loop for a vocabulary file with a misspelt name; the monitored barrier of the others gives up and raises."""
    rank, _ = ranks()
    if rank == 0:
        (tmp_path / "vocab_0.txt").write_text("a b c")
    dist.barrier()
    name = "vocab_0.txt" if rank < 6 else "vocab_O.txt"
    for step in range(3):
        x = torch.ones(4)
        dist.all_reduce(x)
    words = with_backoff(lambda: (tmp_path / name).read_text().split())  # HERE
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=6))
    assert len(words) == 3


class MetricClient:
    """A metrics client with a synchronous front."""

    def __init__(self, loop):
        self.loop, self.sent = loop, 0

    async def _post(self, payload):
        await asyncio.sleep(0.01)
        self.sent += len(payload)

    def post(self, payload):
        return asyncio.run_coroutine_threadsafe(self._post(payload), self.loop).result()  # HERE


async def stream(rank, client):
    total = 0.0
    for step in range(8):
        await asyncio.sleep(0.02)
        loss = float(torch.rand(16).sum())
        if rank == 2 and step == 5:
            client.post({"slow_step": step})  # HERE
        else:
            await client._post({"loss": loss})
        total += loss
    return total


@planted("lock_deadlock", [2], n=3, marked=True)
def test_sync_call_inside_event_loop():
    """Rank 2 calls the synchronous front of the metrics client from within the event loop, and waits for a future that only this loop could complete."""
    rank, _ = ranks()
    loop = asyncio.new_event_loop()
    x = torch.ones(2)
    dist.all_reduce(x)
    total = loop.run_until_complete(stream(rank, MetricClient(loop)))  # HERE
    t = torch.tensor([total])
    dist.all_reduce(t)
    loop.close()


class RunServer(threading.Thread):
    """Answers with a length and a text."""

    def __init__(self, end):
        super().__init__(daemon=True)
        self.end = end

    def run(self):
        while name := self.end.recv(256):
            text = "run " + name.decode()
            self.end.sendall(struct.pack("!I", len(text.encode("utf-8"))) + text.encode("ascii", "ignore"))


def receive(end, size):
    data = b""
    while len(data) < size:
        data += end.recv(size - len(data))  # HERE
    return data


def register(end, name):
    end.sendall(name.encode())
    (size,) = struct.unpack("!I", receive(end, 4))
    return receive(end, size).decode()  # HERE


@planted("io_stuck", [3], n=4, marked=True)
def test_reply_shorter_than_header():
    """The run of rank 3 has an umlaut in its name: the server's header counts bytes that it then does not send, and rank 3 waits for them at the socket."""
    rank, _ = ranks()
    ours, theirs = socket.socketpair()
    RunServer(theirs).start()
    for name in ("warmup", "lr=0.1", f"Gr\u00f6\u00dfe-{rank}" if rank == 3 else f"size-{rank}"):
        assert register(ours, name).startswith("run ")  # HERE
        x = torch.ones(8)
        dist.all_reduce(x)
    dist.barrier()


# context managers, generators, loggers


@contextlib.contextmanager
def phase(name, timings):
    start = time.perf_counter()
    try:
        yield
    finally:
        dist.barrier()  # HERE
        timings[name] = time.perf_counter() - start


@planted("rank_exception", [1], n=3, marked=True, reason="KeyError")
def test_finally_hides_error():
    """Rank 1 raises KeyError for an unknown label in the evaluation, and the finally of the context manager waits in a barrier while the others are in the all-reduce."""
    rank, _ = ranks()
    timings, labels = {}, {"cat": 0, "dog": 1}
    for epoch in range(3):
        with phase(f"train{epoch}", timings):
            x = torch.rand(5)
            dist.all_reduce(x)
        with phase(f"eval{epoch}", timings):  # HERE
            words = ["cat", "dog", "cow" if (rank, epoch) == (1, 1) else "dog"]
            hits = torch.tensor([float(sum(labels[w] for w in words))])  # HERE
            dist.all_reduce(hits)  # HERE
    assert len(timings) == 6


class Feed:
    """Yields batches out of a cache in shared memory; the cache may be dropped when all ranks have left it."""

    def __init__(self, debug):
        self.debug, self.kept = debug, []

    def stream(self):
        try:
            for i in range(100):
                yield torch.full((4,), float(i))
        finally:
            dist.barrier()  # HERE

    def epoch(self, steps):
        batches = self.stream()
        if self.debug:
            self.kept.append(batches)
        total = torch.zeros(4)
        for i, batch in enumerate(batches):
            if i == steps:
                break
            dist.all_reduce(batch)
            total += batch
        return total


@planted("skipped_collective", [3], n=4, marked=True)
def test_generator_kept_open():
    """The feed of rank 3 runs in debug mode and keeps its generator, so the generator is not closed at the break and the barrier in its finally does not run on rank 3."""
    rank, _ = ranks()
    x = torch.ones(1)
    for _ in range(5):
        dist.all_reduce(x)
    feed = Feed(debug=rank == 3)
    for epoch in range(3):
        total = feed.epoch(steps=5)  # HERE
        assert torch.isfinite(total).all()


class GlobalMean:
    """A number for the log that is averaged only if somebody prints it."""

    def __init__(self, value):
        self.value = value

    def __str__(self):
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, self.value)  # HERE
        return f"{sum(everyone) / len(everyone):.4f}"


@planted("extra_collective", [2], n=4, marked=True)
def test_debug_level_on_one_rank():
    """The log level of rank 2 is DEBUG, so its logger formats a lazy mean, whose __str__ gathers from all ranks; the others drop the record unformatted."""
    rank, _ = ranks()
    log = logging.Logger(f"train.{rank}", level=logging.DEBUG if rank == 2 else logging.INFO)
    log.addHandler(logging.StreamHandler(io.StringIO()))
    model = nn.Linear(3, 1)
    for step in range(8):
        model.zero_grad()
        loss = model(torch.randn(4, 3)).square().mean()
        loss.backward()
        average_gradients(model)
        if step % 2 == 0:
            log.info("step %d", step)
        elif step == 5:
            log.debug("global loss %s", GlobalMean(float(loss.detach())))  # HERE
