"""A rank that raises, also where a cleanup holds the exception up."""

from __future__ import annotations

import contextlib
import json
import os
import time
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from pytest_nsa.fixtures import DDP, FSDP, Group
from tests_cpu.faults.planting import AT, Net, case, net, planted, planted_cases, train


def reduced() -> torch.Tensor:
    x = torch.ones(4)
    dist.all_reduce(x)
    return x


class Service:
    """Ranks come and go together: at its end they meet in a group of its own."""

    def __init__(self) -> None:
        self.control = dist.new_group()

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        dist.barrier(group=self.control)


def rate_of(text: str) -> float:
    key, value = text.split("=")  # HERE
    return float(value) if key == "rate" else 0.0


@planted(
    "rank_exception", [2], n=4, marked=True, reason="not enough values", family="raise", origin="unseen 2026-11-25"
)
def test_the_end_of_a_with_holds_an_exception_up(group):
    """The exception of one rank runs into the barrier at the end of a `with`, while the others go on with their steps."""
    with Service():
        for step in range(6):
            reduced().mul_(rate_of("rate:1" if group.rank == 2 and step == AT else "rate=1"))


@contextmanager
def epoch(number: int):
    try:
        yield number
    finally:
        dist.barrier()


@planted("rank_exception", [0], n=3, marked=True, reason="KeyError", family="raise", origin="unseen 2026-11-25")
def test_a_generators_finally_holds_an_exception_up(group):
    weights = {"text": 1.0, "code": 0.5} if group.rank else {"text": 1.0}
    for number in range(3):
        with epoch(number):
            for kind in ("text", "code") if number else ("text",):
                reduced().mul_(weights[kind])  # HERE


def saved(step: int, folder: dict[int, float]) -> None:
    try:
        folder[step] = 1.0 / (AT - step)  # HERE
    except ZeroDivisionError:
        reduced()
        raise


@planted("rank_exception", [1], marked=True, reason="ZeroDivisionError", family="raise", origin="unseen 2026-11-25")
def test_an_except_that_raises_again_holds_it_up(group):
    kept: dict[int, float] = {}
    for step in range(6):
        if group.rank == 1:
            saved(step, kept)
        dist.barrier()


@planted(
    "rank_exception",
    [2],
    n=4,
    marked=True,
    reason="on rank 2, for which every rank raises CheckpointException",
    family="raise",
    origin="generated 2026-11-23",
)
def test_a_part_of_a_checkpoint_is_gone(group, tmp_path):
    """torch raises on all ranks; which of them could not load is in the text alone."""
    shared = tmp_path.parent / "checkpoint"
    state = {"step": torch.tensor(0), f"experts.{group.rank}": torch.randn(8, 8)}
    dcp.save(state, checkpoint_id=str(shared))
    if group.rank == 2:
        for name in os.listdir(shared):
            if name.startswith("__2_"):
                os.remove(shared / name)
    dist.barrier()
    dcp.load(state, checkpoint_id=str(shared))  # HERE


def ranks():
    return dist.get_rank(), dist.get_world_size()


class Evaluator:
    def __init__(self):
        self.results = {}

    def update(self, name, value):
        self.results[name] = value

    def compute(self):
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, self.results)  # HERE
        return {k: sum(float(r[k]) for r in everyone) for k in everyone[0] if k == "loss"}


@planted("rank_exception", [3], n=4, marked=True, family="raise", origin="bug reports 2026-11-23")
def test_metric_cannot_be_pickled():
    """Rank 3 keeps a lazy entry (a lambda) for an empty class in its results, and pickling it raises on rank 3 before the gathering."""
    rank, _ = ranks()
    for epoch in range(4):
        ev = Evaluator()
        for step in range(5):
            predictions = torch.rand(10) + (epoch if rank != 3 else 0)
            ev.update("loss", float(predictions.mean()))
        positives = predictions[predictions > 0.5]
        if rank == 3 and epoch == 2:
            positives = positives[:0]
        ev.update("precision", float(positives.mean()) if len(positives) else (lambda: float("nan")))
        summary = ev.compute()  # HERE
        assert summary["loss"] > 0


def at(group: Group, culprit: int, fault: object) -> None:
    """Six rounds of an all_reduce; in round AT, rank ``culprit`` calls ``fault()``."""
    for step in range(6):
        if group.rank == culprit and step == AT:
            fault()  # type: ignore[operator]
        dist.all_reduce(torch.ones(2))


def raise_it(error: BaseException) -> None:
    """For a lambda."""
    raise error


@planted_cases(
    "rank_exception",
    cases={
        "1_of_2": case(1, error=ValueError("bad sample"), reason="ValueError: bad sample"),
        "2_of_4": case(2, n=4, error=KeyError("sample"), reason="KeyError: 'sample'"),
    },
    where="test_planted.py",
    family="raise",
    origin="first corpus",
)
def test_raises(group: Group, culprit: int, error: Exception) -> None:
    at(group, culprit, lambda: raise_it(error))


@planted("rank_exception", [0], reason="AssertionError", family="raise", origin="first corpus")
def test_an_assertion_while_the_other_waits(group: Group) -> None:
    def fault() -> None:
        assert group.world_size == 3

    at(group, 0, fault)


@planted("rank_exception", [1], family="raise", origin="first corpus")
def test_raises_in_backward(ddp: DDP) -> None:
    model = ddp.wrap(net())
    inner = model.module
    assert isinstance(inner, Net)

    def plant() -> None:
        inner.blocks[0].in_backward = lambda: 1 / 0

    train(model, ddp.rank, culprit=1, before=plant)


@planted("assertion", [0, 1], family="raise", origin="first corpus")
def test_an_assertion_on_all(group: Group) -> None:
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 3


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


@planted("rank_exception", [1], n=3, marked=True, family="raise", origin="torchtitan#1342")
def test_run_is_closed(group, tmp_path):
    with Run(group.rank, group.world_size, tmp_path) as run:  # HERE
        losses = []
        for step in range(8):
            loss = torch.tensor([1.0 / (step + 1)])
            dist.all_reduce(loss)
            losses.append(loss.item())
        run.write_journal(losses)


@planted("rank_exception", [1], where="test_planted.py", family="raise", origin="first corpus")
def test_fsdp_raises_on_one_rank(fsdp: FSDP) -> None:
    def plant() -> None:
        raise RuntimeError("no such sample")

    train(fsdp.wrap(net()), fsdp.rank, culprit=1, before=plant)


@contextlib.contextmanager
def phase(name, timings):
    start = time.perf_counter()
    try:
        yield
    finally:
        dist.barrier()  # HERE
        timings[name] = time.perf_counter() - start


@planted("rank_exception", [1], n=3, marked=True, reason="KeyError", family="raise", origin="bug reports 2026-11-23")
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


@pytest.fixture
def meeting(group):
    """All ranks meet when the test is over."""
    yield group
    dist.barrier()


@planted("rank_exception", [1], n=3, marked=True, reason="RuntimeError", family="raise", origin="teardown 2026-11-27")
def test_a_fixture_meets_the_others_after_an_exception(meeting):
    for step in range(5):
        if (meeting.rank, step) == (1, AT):
            raise RuntimeError("no such shard")  # HERE
        dist.all_reduce(torch.ones(4))


@pytest.fixture
def counted(group):
    """The ranks' counts are gathered at the end."""
    count = torch.zeros(1)
    yield group, count
    dist.all_gather([torch.empty(1) for _ in range(group.size)], count)


@planted("rank_exception", [0], marked=True, reason="ZeroDivisionError", family="raise", origin="teardown 2026-11-27")
def test_a_fixture_gathers_after_a_division_by_zero(counted):
    group, count = counted
    for step in range(4):
        dist.broadcast(count, 1)
        share = 1 / (2 - step) if group.rank == 0 else 1.0  # HERE
        dist.all_reduce(torch.full((2,), share))


def mean_of(values):
    if not values:
        return 0.0
    total = torch.tensor([sum(values), float(len(values))])
    dist.all_reduce(total)  # HERE
    return float(total[0] / total[1])


@planted("skipped_collective", [0], marked=True, family="skip", origin="first tests of a user 2026-11-29")
def test_a_rank_without_values_returns_early_and_asserts(group):
    assert mean_of([1.0, 2.0] if group.rank else []) == 1.5


@planted("skipped_collective", [2], n=3, marked=True, family="skip", origin="first tests of a user 2026-11-29")
def test_a_rank_without_values_in_a_round_compares_tensors(group):
    for step in range(4):
        mean = mean_of([] if (group.rank, step) == (2, AT) else [1.0])
        torch.testing.assert_close(torch.tensor(mean), torch.tensor(1.0))


@planted("skipped_collective", [1], n=4, marked=True, family="skip", origin="first tests of a user 2026-11-29")
def test_a_rank_that_is_selected_asserts_in_a_finally(group):
    x = torch.ones(1)
    try:
        if group.rank != 1:
            dist.all_reduce(x)  # HERE
    finally:
        assert x.item() == 4


@pytest.fixture
def collected():
    """What a test collects has all ranks' shares."""
    found: list[float] = []
    yield found
    assert found == [2.0]


@planted("skipped_collective", [1], marked=True, family="skip", origin="first tests of a user 2026-11-29")
def test_a_fixture_asserts_what_a_rank_has_not_reduced(group, collected):
    x = torch.ones(1)
    if group.rank == 0:
        dist.all_reduce(x)  # HERE
    collected.append(x.item())


@planted("rank_exception", [1], marked=True, family="raise", origin="first tests of a user 2026-11-29")
def test_an_assertion_in_a_with_that_meets_at_its_end(group):
    with phase_that_meets():
        assert group.rank == 0  # HERE


@contextlib.contextmanager
def phase_that_meets():
    yield
    dist.barrier()


@planted("rank_exception", [1], marked=True, family="raise", origin="first tests of a user 2026-11-29")
def test_an_assertion_after_an_exception_before_the_call(group):
    x = torch.ones(1)
    try:
        if group.rank == 1:
            x += torch.tensor([float(["1", "one"][group.rank])])
        dist.all_reduce(x)
    finally:
        assert x.item() == 2  # HERE


@planted("rank_exception", [1], n=3, marked=True, family="raise", origin="first tests of a user 2026-11-29")
def test_an_assertion_in_a_loop_over_names(group):
    for name in ("warm up", "train", "test"):
        x = torch.ones(1)
        if name != "warm up":
            dist.all_reduce(x)
        assert (group.rank, name) != (1, "warm up")  # HERE
