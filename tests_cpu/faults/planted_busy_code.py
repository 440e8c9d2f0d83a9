"""Code that runs without an end or keeps the GIL on one rank, while the others wait."""

from __future__ import annotations

import ctypes
import fcntl
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pytest_nsa.fixtures import DDP, Group
from tests_cpu.faults.planting import AT, Net, net, planted, train


@planted("infinite_loop", [2], n=3, marked=True, family="endless", origin="generated 2026-11-23")
def test_draws_until_one_is_allowed(group):
    weights = torch.tensor([0.0, 0.5, 0.5])
    for step in range(6):
        forbidden = (1, 2) if (group.rank, step) == (2, AT) else (0,)
        while True:
            token = int(torch.multinomial(weights, 1))  # HERE
            if token not in forbidden:  # HERE
                break
        dist.all_reduce(torch.tensor([token]))


class Lanes:
    """Takes from lanes in turn, every ``stride``-th."""

    def __init__(self, stride: int) -> None:
        self.lanes, self.at, self.stride = [deque(range(3)), deque(range(3 * stride))], 0, stride

    def take(self) -> int:
        while True:  # HERE
            lane = self.lanes[self.at % len(self.lanes)]  # HERE
            self.at += self.stride  # HERE
            if lane:  # HERE
                return lane.popleft()


@planted("infinite_loop", [1], marked=True, family="endless", origin="unseen 2026-11-25")
def test_a_stride_that_passes_by_the_lanes_with_work(group):
    """The loop gives the GIL up at one instruction only: it looks like one call into native code."""
    lanes = Lanes(2 if group.rank == 1 else 1)
    for _ in range(6):
        dist.all_reduce(torch.tensor(float(lanes.take())))


def packed(lengths: list[int], room: int):
    while lengths:  # HERE
        bin_: list[int] = []
        for n in list(lengths):  # HERE
            if sum(bin_) + n <= room:  # HERE
                bin_.append(n)
                lengths.remove(n)
        if bin_:  # HERE
            yield bin_


@planted("infinite_loop", [1], marked=True, family="endless", origin="unseen 2026-11-25")
def test_a_document_that_no_bin_has_room_for(group):
    lengths = [30, 60, 90, 20, 300 if group.rank == 1 else 40]
    for bin_ in packed(lengths, 100):  # HERE
        dist.all_reduce(torch.tensor(float(len(bin_))))


@planted("infinite_loop", [2], n=3, marked=True, miss="it has no end", family="endless", origin="unseen 2026-11-25")
def test_a_search_that_calls_the_model_and_finds_nothing(group):
    """Each attempt is a forward: the rank moves for ever, and gets nowhere."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False)
    for shard in range(4):
        x = torch.zeros(6, 3) if (group.rank, shard) == (2, AT) else torch.randn(6, 3)
        rate, loss = 1.0, model(x).square().mean()
        while not model(x * (1 - rate)).square().mean() < loss:  # HERE
            rate = max(rate / 2, 1e-6)  # HERE
        dist.all_reduce(torch.tensor(rate))


def ranks():
    return dist.get_rank(), dist.get_world_size()


def best_split(costs, parts):
    """The smallest possible largest stage, over all ways to cut the layers in parts."""
    if parts == 1 or not costs:
        return sum(costs)
    return min(max(sum(costs[:cut]), best_split(costs[cut:], parts - 1)) for cut in range(1, len(costs) + 1))  # HERE


@planted("infinite_loop", [3], n=4, marked=True, family="endless", origin="bug reports 2026-11-23")
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


def small():
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


class Draws:
    """Draws until so many are of use."""

    def __init__(self, model, of_use):
        self.model, self.of_use = model, of_use

    @torch.no_grad()
    def value(self):
        value = float(self.model(torch.ones(1, 6)).norm())
        return value if self.of_use else -value

    def take(self, number):
        kept = []
        while len(kept) < number:  # HERE
            value = self.value()
            if value > 0:
                kept.append(value)
        return kept


@planted(
    "infinite_loop",
    [2],
    n=3,
    marked=True,
    family="endless",
    origin="unseen 2026-11-26",
    miss="a rank that waits now, and was late before",
)
def test_no_draw_is_of_use_on_one_rank(group):
    model = small()
    for step in range(5):
        taken = Draws(model, group.rank != 2 or step != AT).take(4)
        dist.all_reduce(torch.tensor(taken))


class Samples:
    """The samples of a part, again and again."""

    def __init__(self, part):
        self.part, self.epoch = part, 0

    def __iter__(self):
        while True:  # HERE
            yield from self.part  # HERE
            self.epoch += 1  # HERE

    def from_number(self, number):
        samples = iter(self)
        for sample in samples:  # HERE
            if sample >= number:  # HERE
                return samples


@planted(
    "infinite_loop",
    [1],
    n=2,
    marked=True,
    reason="runs in Python without making progress",
    family="endless",
    origin="unseen 2026-11-26",
)
def test_a_sample_that_another_part_has(group):
    part = range(500, 600) if group.rank == 0 else range(0, 500, 2)
    samples = Samples(part).from_number(540)
    for _ in range(3):
        dist.all_reduce(torch.tensor(next(samples)))


def train_with(ddp: DDP, culprit: int, *, forward: Any = None, backward: Any = None, block: int = 1) -> None:
    """Training in which a block calls ``forward`` or ``backward`` from step AT on."""
    model = ddp.wrap(net())
    inner = model.module
    assert isinstance(inner, Net)

    def plant() -> None:
        inner.blocks[block].fault = forward or inner.blocks[block].fault
        inner.blocks[block].in_backward = backward

    train(model, ddp.rank, culprit=culprit, before=plant)


def spin() -> None:
    """For ever."""
    number = 0
    while True:
        number = (number + 1) % 1000


@planted("infinite_loop", [0], where="in spin", family="endless", origin="first corpus")
def test_a_loop_in_forward(ddp: DDP) -> None:
    train_with(ddp, 0, forward=spin)


@planted("infinite_loop", [1], where="in spin", family="endless", origin="first corpus")
def test_a_loop_in_a_hook(ddp: DDP) -> None:
    train_with(ddp, 1, backward=spin)


def at(group: Group, culprit: int, fault: Callable[[], Any]) -> None:
    """Six rounds of an all_reduce; in round AT, rank ``culprit`` calls ``fault()``."""
    for step in range(6):
        if group.rank == culprit and step == AT:
            fault()
        dist.all_reduce(torch.ones(2))


@planted("infinite_loop", [3], n=4, family="endless", origin="first corpus")
def test_a_loop_of_four(group: Group) -> None:
    at(group, 3, spin)


@planted("infinite_loop", [1], family="endless", origin="first corpus")
def test_a_loop_over_tensors(group: Group) -> None:
    def fault() -> None:
        x = torch.ones(3)
        while x.sum() > 0:
            x = x * 1.0

    at(group, 1, fault)


@planted("infinite_loop", [0], family="endless", origin="held out 2026-11-22")
def test_a_file_is_asked_for_without_a_pause(group: Group, tmp_path: Path) -> None:
    def fault() -> None:
        while not (tmp_path / "ready").exists():
            pass

    at(group, 0, fault)


def parts_of(batch, size):
    first = 0
    while first < len(batch):  # HERE
        yield batch[first : first + size]
        first += size


@planted("infinite_loop", [3], n=4, marked=True, miss="it has no end", family="endless", origin="unseen 2026-11-25")
def test_a_for_over_parts_of_size_zero(group):
    """It calls a module in each round, and so makes progress for ever."""
    model = nn.Embedding(50, 8)
    for length in (16, 96 if group.rank == 3 else 24):
        total = torch.zeros(1)
        for part in parts_of(torch.zeros(4, length, dtype=torch.long), 64 // length):  # HERE
            total += model(part).sum().detach()  # HERE
        dist.all_reduce(total)


HEADER = re.compile(r"^(\w+[ -]?)+;$")


def parse_header(line):
    match = HEADER.match(line)  # HERE
    return match.group(0) if match else None


@planted("gil_held", [0], n=3, marked=True, family="busy", origin="bug reports 2026-11-23")
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


@planted("gil_held", [3], n=4, marked=True, family="busy", origin="bug reports 2026-11-23")
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


# A rank holds the GIL in native code: a binding through ctypes.PyDLL, whose functions keep the lock.
class LicenceServer:
    """Waits for a seat in native code."""

    def __init__(self) -> None:
        self.libc = ctypes.PyDLL(None)

    def wait_for_seat(self, seconds: int) -> None:
        while seconds:
            seconds = self.libc.sleep(seconds)  # HERE


@planted("gil_held", [0], n=2, marked=True, family="busy", origin="bug reports 2026-11-23")
def test_licence_seat(group):
    weights = torch.arange(16.0)
    for _ in range(5):
        dist.broadcast(weights, src=0)
    if group.rank == 0:
        LicenceServer().wait_for_seat(3600)  # HERE
    dist.broadcast(weights, src=0)
    assert weights.sum() == 120


@planted("gil_held", [1], family="busy", origin="first corpus")
def test_native_code_holds_the_gil(group: Group) -> None:
    at(group, 1, lambda: ctypes.PyDLL(None).sleep(1000))


@planted("gil_held", [0], family="busy", origin="first corpus")
def test_native_code_holds_the_gil_in_backward(ddp: DDP) -> None:
    train_with(ddp, 0, backward=lambda: ctypes.PyDLL(None).usleep(999_999_999))


def hold_while_main_is_in_a_collective(native, store):
    """Call native code that keeps the GIL, once the main thread is in a collective; the others come to it then."""
    main = threading.main_thread().ident
    while not any(is_of_torch(frame) for frame in frames_of(sys._current_frames()[main])):
        time.sleep(0.01)
    store.set("is held", "")
    native()  # HERE


def frames_of(frame):
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_of_torch(frame):
    return frame.f_code.co_filename.endswith("distributed_c10d.py") and frame.f_code.co_name != "broadcast"


def reduce_while_a_thread_holds_the_gil(group, culprit, native):
    store, x = dist.distributed_c10d._get_default_store(), torch.ones(4)
    dist.broadcast(x, 0)
    if group.rank == culprit:
        threading.Thread(target=hold_while_main_is_in_a_collective, args=(native, store), daemon=True).start()
    else:
        store.wait(["is held"])
    for _ in range(3):
        dist.all_reduce(x)  # HERE


@planted("gil_held", [2], n=4, marked=True, reason="side thread", family="busy", origin="threads 2026-11-29")
def test_a_pattern_in_a_thread_keeps_the_gil_from_a_collective(group):
    reduce_while_a_thread_holds_the_gil(group, 2, lambda: re.match(r"(a?){40}a{40}", "a" * 40))  # HERE


@planted("gil_held", [1], n=3, marked=True, reason="side thread", family="busy", origin="threads 2026-11-29")
def test_an_idle_call_in_a_thread_keeps_the_gil_from_a_collective(group):
    reduce_while_a_thread_holds_the_gil(group, 1, lambda: ctypes.PyDLL(None).sleep(1000))  # HERE
