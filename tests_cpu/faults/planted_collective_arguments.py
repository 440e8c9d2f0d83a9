"""Collectives with arguments that differ between ranks: shapes, element types, counts, roots, reductions."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pytest_nsa.fixtures import Group
from tests_cpu.faults.planting import AT, case, planted, planted_cases


@planted("collective_mismatch", [0, 1], reason="from rank 1", family="mismatch", origin="held out 2026-11-22")
def test_everybody_broadcasts_its_own(group: Group) -> None:
    seed = torch.tensor([group.rank + 17.0])
    dist.broadcast(seed, src=dist.get_rank())
    found = [torch.zeros(1), torch.zeros(1)]
    dist.all_gather(found, seed)
    assert found[0].item() == found[1].item()


@planted("collective_mismatch", [1], n=3, family="mismatch", origin="held out 2026-11-22")
def test_scatters_from_another_rank(group: Group) -> None:
    src = 1 if group.rank == 1 else 0
    shards = [{"shard": i, "pad": "x" * 50 * i} for i in range(3)]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, shards if group.rank == src else None, src=src)
    dist.barrier()
    assert mine[0]["shard"] == group.rank


@planted("collective_mismatch", [2], n=3, reason="max", family="mismatch", origin="held out 2026-11-22")
def test_reduces_by_another_operation(group: Group) -> None:
    t = torch.ones(4)
    dist.all_reduce(t, dist.ReduceOp.MAX if group.rank == 2 else dist.ReduceOp.SUM)
    assert t.tolist() == [3.0] * 4


@planted_cases(
    "collective_mismatch",
    cases={
        "to_one": case(2, n=3, more=[2, 1, 1], reason="rank 2 gives 2 to rank 0, which takes 1"),
        "to_two": case(
            1, n=3, more=[2, 1, 2], reason="1 gives 2 to rank 0, which takes 1; rank 1 gives 2 to rank 2, which takes 1"
        ),
    },
    family="mismatch",
    origin="held out 2026-11-22",
)
def test_sends_more_than_is_taken(group: Group, culprit: int, more: list[int]) -> None:
    given = more if group.rank == culprit else [1, 1, 1]
    taken = torch.zeros(3, 2)
    dist.all_to_all_single(taken, torch.ones(sum(given), 2), [1, 1, 1], given)
    dist.barrier()


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x):
        h = self.body(x)
        found = (h > -10).sum() if len(x) else torch.zeros(())
        dist.all_reduce(found)  # HERE
        return self.head(h).sum() / found.clamp(min=1)


@planted("collective_mismatch", [1], n=3, marked=True, family="mismatch", origin="unseen 2026-11-26")
def test_a_count_of_nothing_is_a_float(group):
    """All are at one line of the forward: no rank takes another way through the modules."""
    torch.manual_seed(1)
    model = Parts()
    for step in range(6):
        model(torch.randn(0 if group.rank == 1 and step == AT else 5, 6)).backward()


def rounds(group: Group, culprit: int, fault: str) -> None:
    """Six rounds of two collectives; rank ``culprit`` does otherwise in round AT."""
    total, many = torch.ones(4), [torch.zeros(2) for _ in range(group.world_size)]
    for step in range(6):
        is_it = group.rank == culprit and step == AT
        if is_it and fault == "shape":
            dist.all_reduce(torch.ones(5))
        elif is_it and fault == "dtype":
            dist.all_reduce(torch.ones(4, dtype=torch.float64))
        elif is_it and fault == "dtype of equal size":
            dist.all_reduce(torch.ones(4, dtype=torch.int32))
        else:
            dist.all_reduce(total)
        dist.all_gather(many, torch.ones(2))


@planted_cases(
    "collective_mismatch",
    cases={
        "shape": case(1, fault="shape"),
        "dtype": case(0, fault="dtype"),
        "dtype_of_equal_size": case(1, fault="dtype of equal size"),
    },
    family="mismatch",
    origin="first corpus",
)
def test_other_payload(group: Group, culprit: int, fault: str) -> None:
    rounds(group, culprit, fault)


@planted(
    "collective_mismatch",
    [2],
    n=4,
    marked=True,
    reason="gave different arguments",
    family="mismatch",
    origin="arguments",
)
def test_one_rank_gives_other_types_to_a_gather(group):
    x = torch.ones(4, dtype=torch.int32 if group.rank == 2 else torch.float32)
    dist.gather(x, [torch.empty(4) for _ in range(4)] if group.rank == 0 else None, dst=0)  # HERE


@planted(
    "collective_mismatch",
    [1],
    n=3,
    marked=True,
    reason="gave different arguments",
    family="mismatch",
    origin="arguments",
)
def test_a_scatter_into_another_type(group):
    here = torch.empty(2, dtype=torch.int32 if group.rank == 1 else torch.float32)
    dist.scatter(here, [torch.ones(2) for _ in range(3)] if group.rank == 0 else None, src=0)  # HERE


@planted(
    "collective_mismatch",
    [1],
    n=3,
    marked=True,
    reason="gave different arguments",
    family="mismatch",
    origin="arguments",
)
def test_a_scatter_into_a_longer_buffer(group):
    here = torch.empty(3 if group.rank == 1 else 2)
    dist.scatter(here, [torch.ones(2) for _ in range(3)] if group.rank == 0 else None, src=0)  # HERE


@planted(
    "collective_mismatch", [1], marked=True, reason="gave different arguments", family="mismatch", origin="arguments"
)
def test_a_gather_of_fewer_in_one_round(group):
    """Of two ranks, the one that gave something else than in the rounds before."""
    for step in range(5):
        x = torch.ones(3 if group.rank == 1 and step == AT else 4)
        dist.gather(x, [torch.empty(4) for _ in range(2)] if group.rank == 0 else None, dst=0)  # HERE


@planted("collective_mismatch", [0], n=3, marked=True, reason="max", family="mismatch", origin="arguments")
def test_one_rank_takes_the_largest_in_a_reduce_scatter(group):
    out, op = torch.empty(2), dist.ReduceOp.MAX if group.rank == 0 else dist.ReduceOp.SUM
    dist.reduce_scatter_tensor(out, torch.ones(6), op=op)  # HERE


@planted(
    "collective_mismatch",
    [2],
    n=3,
    marked=True,
    reason="gave different arguments",
    family="mismatch",
    origin="arguments",
)
def test_an_exchange_of_all_with_another_type(group):
    kind = torch.float64 if group.rank == 2 else torch.int64
    out = torch.empty(3, dtype=kind)
    dist.all_to_all_single(out, torch.ones(3, dtype=kind))  # HERE


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


@planted("collective_mismatch", [0], n=4, marked=True, family="mismatch", origin="pytorch#71405")
def test_histogram_of_labels(group):
    histogram = LabelHistogram()
    for step in range(10):
        histogram.add(labels_of(group.rank, step))  # HERE
    assert histogram.total.sum() > 0


class Rows(nn.Module):
    """A layer whose rows are shared among ranks, on sequences that are shared as well or are not."""

    def __init__(self, in_parts):
        super().__init__()
        self.in_parts = in_parts

    def forward(self, x):
        if self.in_parts:
            parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, x)  # HERE
            x = torch.cat(parts)
        if self.in_parts:
            return x[: len(x) // dist.get_world_size()]
        dist.all_reduce(x)  # HERE
        return x


@planted("collective_mismatch", [2], n=4, marked=True, family="mismatch", origin="unseen 2026-11-26")
def test_one_rank_s_layer_is_of_another_kind(group):
    layers = [Rows(True), Rows(True), Rows(group.rank != 2)]
    for _ in range(3):
        x = torch.randn(2, 8)
        for layer in layers:
            x = layer(x)


def exchange(rows, gives, takes):
    got = torch.zeros(sum(takes), 2)
    dist.all_to_all_single(got, rows[: sum(gives)], takes, gives)  # HERE


@planted(
    "collective_mismatch",
    [3],
    n=4,
    marked=True,
    reason="not what rank 3 has told",
    family="mismatch",
    origin="unseen 2026-11-26",
    miss="what ranks told each other before an exchange",
)
def test_other_rows_than_were_told(group):
    """Two ranks do not agree on a number of rows: what they told each other decides who is wrong."""
    for step in range(5):
        gives = torch.tensor([1 + (group.rank + peer + step) % 3 for peer in range(4)])
        takes = torch.empty_like(gives)
        dist.all_to_all_single(takes, gives)
        if (group.rank, step) == (3, 3):
            gives[2] += 1  # HERE
        exchange(torch.ones(20, 2), gives.tolist(), takes.tolist())


@planted(
    "collective_mismatch", [0, 1], marked=True, reason="another size", family="mismatch", origin="unseen 2026-11-29"
)
def test_sizes_of_a_call_of_the_backend(group):
    """The backend's object is called, which no trace records: gloo aborts a rank, and the recorded calls agree."""
    dist.all_reduce(torch.ones(3))
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    backend.allreduce([torch.ones(4000 if group.rank else 4)]).wait()  # HERE
