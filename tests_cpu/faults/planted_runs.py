"""Programs as users write them, after real bug reports: the order of collectives, sub-groups, ranks that die or raise.

Written by hands that had not read the rules. A verdict must name a line that is marked with HERE.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import random
import time
from collections import Counter

import torch
import torch.distributed as dist
from torch import nn

log = logging.getLogger("trainer")

from tests_cpu.faults.planting import planted

# 1
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


@planted("straggler", [2], n=4, marked=True)
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


# 2
# Ray: skew of counts. The skipped batch of fairseq and of pytorch issue 44353: an allocation fails on one rank, the
# handler goes on with the next batch, and that rank has reduced one gradient fewer than the others.


class Attention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.project = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor, claimed_length: int) -> torch.Tensor:
        h = self.project(x)
        scores = torch.empty(claimed_length, claimed_length)  # HERE
        return h.mean() + 0 * scores[0, 0].nan_to_num()


def average_gradients(model: nn.Module, size: int) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)  # HERE
        parameter.grad /= size


def guarded_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, int], size: int
) -> float | None:
    x, length = batch
    optimizer.zero_grad()
    try:
        loss = model(x, length)  # HERE
        loss.backward()
    except RuntimeError as error:  # HERE
        if "memory" not in str(error):
            raise
        log.warning("ran out of memory, skipping this batch of length %d", length)  # HERE
        return None  # HERE
    average_gradients(model, size)  # HERE
    optimizer.step()
    return loss.item()


@planted("skipped_collective", [1], n=3, marked=True)
def test_batch_that_does_not_fit(group):
    torch.manual_seed(0)
    model = Attention(16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for step in range(14):
        length = 1 << 26 if (group.rank, step) == (1, 8) else 64  # a sample whose header is corrupt
        loss = guarded_step(model, optimizer, (torch.randn(4, 16), length), group.world_size)
        if loss is not None:
            losses.append(loss)
    assert len(losses) > 10


# 3
# Ray: operation mismatch. A meter that reduces to one rank where its site says so, and to all elsewhere; the site of
# one rank is another (torchmetrics' and Lightning's `reduce_fx` questions are of this kind).


class Meter:
    def __init__(self, environ: dict[str, str]) -> None:
        self.sink = environ.get("METER_SINK")
        self.values: list[float] = []

    def update(self, value: float) -> None:
        self.values.append(value)

    def synchronise(self) -> torch.Tensor:
        total = torch.tensor([sum(self.values), float(len(self.values))])
        self.values.clear()
        if self.sink is None:
            dist.all_reduce(total)  # HERE
        else:
            dist.reduce(total, dst=int(self.sink))  # HERE
        return total


def site_settings(rank: int, epoch: int) -> dict[str, str]:
    settings = {}
    if rank == 2 and epoch >= 3:  # its node was drained, and it went on elsewhere
        settings["METER_SINK"] = "0"  # HERE
    return settings


@planted("collective_mismatch", [2], n=3, marked=True)
def test_meter_with_a_sink(group):
    for epoch in range(6):
        meter = Meter({**os.environ, **site_settings(group.rank, epoch)})
        for step in range(5):
            meter.update(epoch + step / 5)
        total = meter.synchronise()
        assert total[1] > 0
        dist.barrier()


# 4
# Ray: shape mismatch. torch.bincount without minlength: the vector is as long as the highest label of the batch, and
# one rank's batch lacks the highest class (many confusion matrices, e.g. pytorch issue 71405, turn on minlength).


class LabelHistogram:
    def __init__(self) -> None:
        self.total: torch.Tensor | None = None

    def add(self, labels: torch.Tensor) -> None:
        counts = torch.bincount(labels)  # HERE
        dist.all_reduce(counts)  # HERE
        self.total = counts if self.total is None else self.total + counts


def labels_of(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    labels = torch.randint(0, 10, (64,), generator=generator)
    labels[0] = 9
    if rank == 0 and step == 6:
        labels = labels[labels < 9]
    return labels


@planted("collective_mismatch", [0], n=4, marked=True)
def test_histogram_of_labels(group):
    histogram = LabelHistogram()
    for step in range(10):
        histogram.add(labels_of(group.rank, step))  # HERE
    assert histogram.total.sum() > 0


# 5
# Ray: a dead rank. A native image decoder that trusts the size in a header.


class NativeDecoder:
    def __init__(self) -> None:
        self.frame = (ctypes.c_char * 4096)()

    def decode(self, address: int, size: int) -> int:
        ctypes.memmove(self.frame, address, size)  # HERE
        return sum(self.frame.raw[:16])


@planted("rank_died", [0], n=3, marked=True)
def test_native_decoder(group):
    decoder = NativeDecoder()
    good = ctypes.create_string_buffer(b"\x01" * 4096)
    checksum = torch.zeros(1)
    for step in range(12):
        address = ctypes.addressof(good)
        if group.rank == 0 and step == 7:
            address = 0x18  # a null pointer to a record, and an offset into it
        checksum[0] = decoder.decode(address, 4096)  # HERE
        dist.all_reduce(checksum)
    assert checksum.item() > 0


# 6
# Ray: one of two groups stalls. Two replicas that report inside their own group; a rank with nothing to report returns
# early from the flush, and its replica waits for it while the other replica is past.


class ReplicaReporter:
    def __init__(self, rank: int) -> None:
        replicas = [[0, 1], [2, 3]]
        groups = [dist.new_group(ranks) for ranks in replicas]
        self.group = groups[rank // 2]
        self.pending: list[float] = []

    def note(self, loss: float, wanted: bool) -> None:
        if wanted:
            self.pending.append(loss)

    def flush(self) -> float | None:
        if not self.pending:  # HERE
            return None  # HERE
        summed = torch.tensor([sum(self.pending)])
        dist.all_reduce(summed, group=self.group)  # HERE
        self.pending.clear()
        return summed.item()


@planted("skipped_collective", [3], n=4, marked=True)
def test_replicas_report(group):
    reporter = ReplicaReporter(group.rank)
    gradient = torch.ones(8)
    for step in range(16):
        outlier = group.rank == 3 and step >= 10  # filtered: the loss of its shard is out of range from here on
        reporter.note(loss=1.0 / (step + 1), wanted=not outlier)
        reporter.flush()  # HERE
        dist.all_reduce(gradient)  # HERE
        gradient /= group.world_size


# 7
# A rank raises while its process group is being destroyed: `finally: destroy_process_group()` takes the group down
# while the exception is on its way, so that the others complain first (torchtitan PR 1342, fairseq2 PR 1024).


UPLOAD_SECONDS = {1: 3.0}  # behind a slow link


class Run:
    def __init__(self, rank: int, size: int, folder) -> None:
        self.rank, self.size = rank, size
        self.journal = folder / f"journal-{rank}.json"

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_exc) -> None:
        try:
            self.publish(self.read_journal())  # HERE
        finally:
            dist.destroy_process_group()
            time.sleep(UPLOAD_SECONDS.get(self.rank, 0.1))

    def write_journal(self, losses: list[float]) -> None:
        text = json.dumps({"rank": self.rank, "losses": losses})
        if self.rank == 1:
            text = text[:-7]  # its quota is used up
        self.journal.write_text(text)

    def read_journal(self) -> dict:
        return json.loads(self.journal.read_text())  # HERE

    def publish(self, summary: dict) -> list[dict]:
        everyone: list = [None] * self.size
        dist.all_gather_object(everyone, summary)
        return everyone


@planted("rank_exception", [1], n=3, marked=True)
def test_run_is_closed(group, tmp_path):
    with Run(group.rank, group.world_size, tmp_path) as run:  # HERE
        losses = []
        for step in range(8):
            loss = torch.tensor([1.0 / (step + 1)])
            dist.all_reduce(loss)
            losses.append(loss.item())
        run.write_journal(losses)


# 8
# A rank holds the GIL in native code: a binding through ctypes.PyDLL, whose functions keep the lock.


class LicenceServer:
    """Waits for a seat in native code."""

    def __init__(self) -> None:
        self.libc = ctypes.PyDLL(None)

    def wait_for_seat(self, seconds: int) -> None:
        while seconds:
            seconds = self.libc.sleep(seconds)  # HERE


@planted("gil_held", [0], n=2, marked=True)
def test_licence_seat(group):
    weights = torch.arange(16.0)
    for _ in range(5):
        dist.broadcast(weights, src=0)
    if group.rank == 0:
        LicenceServer().wait_for_seat(3600)  # HERE
    dist.broadcast(weights, src=0)
    assert weights.sum() == 120
