"""Code that is slow on one rank or on all: native calls, compilation, stragglers, large graphs."""

from __future__ import annotations

import random
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from pytest_nsa import fixtures
from pytest_nsa.fixtures import Group
from tests_cpu.faults.planting import AT, Net, case, net, planted, planted_cases, train


def ranks():
    return dist.get_rank(), dist.get_world_size()


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


@planted(
    "slow", [0], marked=True, family="slow", origin="bug reports 2026-11-23", miss="a for loop that comes to its end"
)
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


@planted("straggler", [2], n=4, marked=True, family="slow", origin="bug reports 2026-11-23")
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


# Ray's NCCL fault tests: a straggler. A tokenizer whose cache has no room on one rank, as when the budget of a host is
# written down for three of its four ranks.
def merge_pair(tokens: list[str], left: str, right: str) -> list[str]:
    merged, i = [], 0
    while i < len(tokens):  # HERE
        if tokens[i] == left and i + 1 < len(tokens) and tokens[i + 1] == right:  # HERE
            merged.append(left + right)  # HERE
            i += 2  # HERE
        else:
            merged.append(tokens[i])  # HERE
            i += 1  # HERE
    return merged


class PairTokenizer:
    """Joins the most frequent pair, again and again, and remembers what it has done before."""

    def __init__(self, cache_entries: int, merges: int = 60) -> None:
        self.cache: dict[str, list[str]] = {}
        self.cache_entries = cache_entries
        self.merges = merges

    def encode(self, text: str) -> list[str]:
        known = self.cache.get(text)
        if known is not None:
            return known
        tokens = list(text)
        for _ in range(self.merges):
            frequency = Counter(zip(tokens, tokens[1:]))  # HERE
            (left, right), _count = frequency.most_common(1)[0]  # HERE
            tokens = merge_pair(tokens, left, right)  # HERE
        if len(self.cache) < self.cache_entries:
            self.cache[text] = tokens
        return tokens


CACHE_ENTRIES = {0: 64, 1: 64, 3: 64}


@planted("straggler", [2], n=4, marked=True, family="slow", origin="bug reports 2026-11-23")
def test_tokenizer_cache_budget(group):
    tokenizer = PairTokenizer(CACHE_ENTRIES.get(group.rank, 0))  # HERE
    letters = random.Random(0)
    documents = ["".join(letters.choices("etaoinshrdlu ", k=8000)) for _ in range(2)]
    lengths = torch.zeros(1)
    for step in range(2000):
        tokens = tokenizer.encode(documents[step % len(documents)])  # HERE
        lengths[0] = len(tokens)
        dist.all_reduce(lengths)
        assert lengths.item() > 0


def train_slowly(ddp: fixtures.DDP, culprit: int) -> None:
    """Each block of one rank takes half a second."""
    model = ddp.wrap(net())
    inner = model.module
    assert isinstance(inner, Net)
    if ddp.rank == culprit:
        for block in inner.blocks:
            block.fault = lambda: time.sleep(0.4)
    train(model, ddp.rank, steps=1000)


@planted_cases("straggler", cases={"1_of_2": case(1), "2_of_4": case(2, n=4)}, family="slow", origin="first corpus")
def test_one_rank_is_slow(ddp: fixtures.DDP, culprit: int) -> None:
    train_slowly(ddp, culprit)


@planted("straggler", [0], family="slow", origin="first corpus")
def test_one_rank_needs_seconds_for_a_step(ddp: fixtures.DDP) -> None:
    model = ddp.wrap(net())
    for _ in range(1000):
        time.sleep(1.9 if ddp.rank == 0 else 0)
        model(torch.ones(2, 8)).sum().backward()


@planted("slow", [0, 1], family="slow", origin="first corpus")
def test_all_ranks_are_slow(ddp: fixtures.DDP) -> None:
    model = ddp.wrap(net())
    for block in model.module.blocks:
        block.fault = lambda: time.sleep(0.2)
    train(model, ddp.rank, steps=1000)


class Scan(nn.Module):
    """Position by position: three autograd nodes each, and the backward of each selection makes zeros of x's whole size."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, S, dim] -> the same."""
        return torch.stack([x[:, t] * self.weight for t in range(x.shape[1])], dim=1)


@planted("graph_explosion", [0, 1], reason="scan makes", family="slow", origin="first corpus")
def test_a_module_with_sixty_thousand_autograd_nodes(ddp: fixtures.DDP) -> None:
    layers = OrderedDict(out=nn.Linear(64, 64), scan=Scan(64))
    ddp.wrap(nn.Sequential(layers))(torch.ones(1, 20_000, 64)).sum().backward()


def at(group: Group, culprit: int, fault: Callable[[], Any]) -> None:
    """Six rounds of an all_reduce; in round AT, rank ``culprit`` calls ``fault()``."""
    for step in range(6):
        if group.rank == culprit and step == AT:
            fault()
        dist.all_reduce(torch.ones(2))


@planted("native_busy", [1], family="busy", origin="first corpus")
def test_a_long_product(group: Group) -> None:
    def fault() -> None:
        a = torch.randn(3000, 3000)
        for _ in range(1000):
            torch.linalg.svd(a)

    at(group, 1, fault)


@planted("native_busy", [0], family="busy", origin="first corpus")
def test_a_long_native_call(group: Group) -> None:
    import hashlib

    at(group, 0, lambda: hashlib.pbkdf2_hmac("sha256", b"x", b"y", 10**9))


@planted("compiling", [1], family="busy", origin="first corpus")
def test_a_compile_that_takes_long(group: Group) -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        end = time.monotonic() + 1000
        while time.monotonic() < end:
            sum(range(1000))
        return graph.forward

    at(group, 1, lambda: torch.compile(lambda x: x * 2, backend=backend)(torch.ones(2)))


@planted("straggler", [0], marked=True, reason="gave up barrier #2", family="slow", origin="unseen 2026-11-28")
def test_a_rank_is_waited_for_until_the_limit_of_its_group(group: Group) -> None:
    """It arrives later, and finds that the others have gone."""
    short = dist.new_group(timeout=timedelta(seconds=1.5))
    dist.barrier(group=short)
    end = time.monotonic() + (3.5 if group.rank == 0 else 0)
    while time.monotonic() < end:  # HERE
        sum(range(20_000))  # HERE
    dist.barrier(group=short)
