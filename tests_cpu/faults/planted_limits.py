"""Memory, exits and signals; code that is busy, native or slow: programs as users write them, each with a fault after a real bug report.

Written by hands that had not read the rules. A verdict must name a line that is marked with HERE.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import signal
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

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


# memory, exits, signals


def attention_weights(length):
    return torch.empty(length, length).uniform_()  # HERE


@planted("skipped_collective", [2], n=3, marked=True)
def test_oom_batch_is_skipped():
    """Rank 2 runs out of memory with one very long sequence, catches it and goes to the next batch without the all-reduce of this step."""
    rank, _ = ranks()
    weight, skipped = nn.Parameter(torch.ones(4)), 0
    lengths = [64, 80, 96, 5_000_000 if rank == 2 else 90, 70, 60, 50]
    for length in lengths:
        try:
            loss = (attention_weights(length).mean() * weight).sum()  # HERE
        except RuntimeError as error:
            if "memory" not in str(error):
                raise
            skipped += 1
            weight.grad = None
            continue
        loss.backward()
        dist.all_reduce(weight.grad)  # HERE
        weight.data -= 0.01 * weight.grad
        weight.grad = None
    seen = [None] * dist.get_world_size()
    dist.all_gather_object(seen, skipped)


class QuotaGuard:
    """A callback that leaves at once when the scratch quota is used up."""

    def __init__(self, folder, rank, quota):
        self.file, self.quota = folder / f"log{rank}.txt", quota

    def on_step(self, step, lines):
        with self.file.open("a") as f:
            f.write("x" * lines)
        if self.file.stat().st_size > self.quota:
            os._exit(0)  # HERE


@planted("rank_exited", [0], n=3, marked=True)
def test_quota_guard_exits(tmp_path):
    """Rank 0 writes the long log, its guard finds the quota used up in step 6 and calls os._exit(0), without a word to the others."""
    rank, _ = ranks()
    guard = QuotaGuard(tmp_path, rank, quota=1000)
    for step in range(20):
        x = torch.rand(6)
        dist.all_reduce(x)
        time.sleep(0.05)
        guard.on_step(step, lines=160 if rank == 0 else 10)  # HERE


class Governor:
    """Pauses the process when the (simulated) package is too hot; the cluster's daemon should wake it."""

    def __init__(self, limit):
        self.limit, self.heat = limit, 0.0

    def tick(self, flops):
        self.heat += flops
        if self.heat > self.limit:
            os.kill(os.getpid(), signal.SIGSTOP)  # HERE


@planted("rank_stopped", [1], n=4, marked=True)
def test_governor_stops_rank():
    """The governor of rank 1 stops the process (SIGSTOP) after some steps, and no daemon continues it."""
    rank, _ = ranks()
    governor = Governor(limit=50.0 if rank == 1 else 1e9)
    a = torch.rand(32, 32)
    for step in range(30):
        b = a @ a
        governor.tick(6.0)  # HERE
        dist.all_reduce(b)


def limit_memory(limit_items, cache):
    """A watchdog as on our cluster: kills the process whose cache has grown too far."""

    def watch():
        while True:
            if len(cache) > limit_items:
                os.kill(os.getpid(), signal.SIGKILL)  # HERE
            time.sleep(0.02)

    threading.Thread(target=watch, daemon=True).start()


def featurize(cache, count):
    for i in range(count):
        cache.append(torch.full((8,), float(i)))  # HERE
        time.sleep(0.001)  # HERE
    return len(cache)


@planted("rank_died", [5], n=6, marked=True)
def test_memory_watchdog_kills():
    """The watchdog kills rank 5 with SIGKILL while it fills its feature cache, which is twenty times as big as those of the others."""
    rank, _ = ranks()
    cache = []
    limit_memory(1500, cache)
    x = torch.ones(2)
    for _ in range(5):
        dist.all_reduce(x)
    size = featurize(cache, 4000 if rank == 5 else 200)  # HERE
    dist.all_reduce(torch.tensor([float(size)]))


# busy code, native code, slow code


def best_split(costs, parts):
    """The smallest possible largest stage, over all ways to cut the layers in parts."""
    if parts == 1 or not costs:
        return sum(costs)
    return min(max(sum(costs[:cut]), best_split(costs[cut:], parts - 1)) for cut in range(1, len(costs) + 1))  # HERE


@planted("infinite_loop", [3], n=4, marked=True)
def test_pipeline_planner_recursion():
    """Rank 3 plans with the layers of the deep variant, and the planner's recursion without memory tries billions of cuts."""
    rank, _ = ranks()
    for depth in (3, 4, 5):
        t = torch.tensor([best_split([1.0] * depth, 3)])
        dist.all_reduce(t)
    layers = [1.0 + (i % 5) for i in range(64 if rank == 3 else 8)]
    stage = best_split(layers, 12 if rank == 3 else 4)  # HERE
    t = torch.tensor([stage])
    dist.all_reduce(t, op=dist.ReduceOp.MAX)


HEADER = re.compile(r"^(\w+[ -]?)+;$")


def parse_header(line):
    match = HEADER.match(line)  # HERE
    return match.group(0) if match else None


@planted("gil_held", [0], n=3, marked=True)
def test_regex_blows_up():
    """The header that rank 0 reads lacks the closing semicolon, and the nested quantifiers of the pattern backtrack for ever inside the regular expression engine."""
    rank, _ = ranks()
    lines = ["alpha beta-gamma;", "one two three;"]
    lines.append("the quick brown fox jumps over the lazy dog " * 3 + ("and away!" if rank == 0 else "and away;"))
    kept = []
    for line in lines:
        kept.append(parse_header(line))  # HERE
        x = torch.tensor([float(len(line))])
        dist.all_reduce(x)
    dist.barrier()


class NativeCache:
    """A cache of tokens whose lock is taken by a library that was loaded as a Python library, so calls keep the GIL."""

    def __init__(self, path):
        self.path, self.libc = path, ctypes.PyDLL(None)

    def append(self, tokens):
        with open(self.path, "a") as f:
            self.libc.flock(f.fileno(), fcntl.LOCK_EX)  # HERE
            f.write(" ".join(map(str, tokens)) + "\n")


@planted("gil_held", [3], n=4, marked=True)
def test_native_lock_keeps_gil(tmp_path):
    """Rank 3 still has the cache file open and locked by its reader when its native writer waits for that lock, holding the GIL."""
    rank, _ = ranks()
    path = tmp_path / f"tokens{rank}.txt"
    path.touch()
    cache = NativeCache(path)
    for step in range(5):
        cache.append(range(step))
        dist.barrier()
    reader = open(path)
    fcntl.flock(reader, fcntl.LOCK_SH)
    if rank != 3:
        reader.close()
    for step in range(5):
        cache.append(range(step))  # HERE
        x = torch.ones(1)
        dist.all_reduce(x)


class SoftDTW(nn.Module):
    """Alignment loss by dynamic programming, one autograd node after the other."""

    def forward(self, a, b):
        cost = torch.cdist(a, b)
        n, m = cost.shape
        far = cost.new_tensor(1e6)
        row = [cost.new_zeros(())] + [far] * m
        for i in range(n):
            new = [far]
            for j in range(m):
                best = -torch.logsumexp(torch.stack([-row[j], -row[j + 1], -new[j]]), 0)  # HERE
                new.append(cost[i, j] + best)  # HERE
            row = new  # HERE
        return row[m]


@planted("slow", [0], marked=True)
def test_alignment_loss_graph():
    """Rank 0 gets a pair of long recordings, and the alignment loss builds one scalar autograd node after the other, millions of them."""
    rank, _ = ranks()
    torch.manual_seed(0)
    model, criterion = DDP(nn.Linear(4, 4)), SoftDTW()
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step, length in enumerate([6, 8, 7, 2500 if rank == 0 else 8, 6]):
        audio, target = torch.randn(length, 4), torch.randn(length, 4)
        opt.zero_grad()
        loss = criterion(model(audio), target)  # HERE
        loss.backward()
        opt.step()


def augment(image, passes):
    """A blur in plain Python."""
    pixels = image.tolist()
    for _ in range(passes):
        pixels = [
            [(row[i - 1] + row[i] + row[(i + 1) % len(row)]) / 3 for i in range(len(row))] for row in pixels
        ]  # HERE
    return torch.tensor(pixels)


@planted("straggler", [2], n=4, marked=True)
def test_big_images_on_one_rank():
    """The images of rank 2 are 16 times as big as those of the others, and its augmentation in plain Python takes half a second a step, for which all wait."""
    rank, _ = ranks()
    torch.manual_seed(rank)
    model = DDP(nn.Conv2d(1, 2, 3))
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    side = 160 if rank == 2 else 40
    for step in range(150):
        image = augment(torch.rand(side, side), passes=80 if rank == 2 else 2)  # HERE
        opt.zero_grad()
        model(image[None, None]).mean().backward()
        opt.step()
