"""Which rank the verdict names when ranks diverge in real training loops: uneven batches, construction, point-to-point."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from pytest_nsa.fixtures import DDP
from pytest_nsa.session.launch import Launch


def line_of(text: str) -> int:
    """Return the number of the line of this file that ends in the comment ``text``."""
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {text}"))


def wrapped(ddp: DDP) -> torch.nn.Module:
    torch.manual_seed(0)
    return ddp.wrap(torch.nn.Linear(4, 4))


def step(model: torch.nn.Module) -> torch.Tensor:
    loss = model(torch.ones(2, 4)).sum()
    loss.backward()
    return loss.detach().clone()


def rank0_has_a_batch_less(ddp: DDP) -> None:
    model = wrapped(ddp)
    for _ in range(3 if ddp.rank == 0 else 4):
        step(model)
    dist.all_gather_object([None, None], ddp.rank)


def rank0_has_a_batch_less_in_the_second_epoch(ddp: DDP) -> None:
    model = wrapped(ddp)
    for batches in (3, 2 if ddp.rank == 0 else 3):
        for _ in range(batches):
            loss = step(model)
        dist.all_reduce(loss)


def rank1_skips_the_loss_of_a_step(ddp: DDP) -> None:
    model = wrapped(ddp)
    for index in range(4):
        loss = step(model)
        if not (ddp.rank == 1 and index == 2):
            dist.all_reduce(loss)  # the loss


def rank1_has_a_barrier_of_its_own(ddp: DDP) -> None:
    if ddp.rank == 1:
        dist.barrier()  # the barrier
    wrapped(ddp)


def rank1_never_sends(rank: int) -> None:
    if rank == 0:
        dist.recv(torch.ones(1), src=1)  # the receive


def test_fewer_batches_are_reported_as_such(launch: Launch) -> None:
    verdict = launch(rank0_has_a_batch_less, timeout=30).verdict
    assert (verdict.cause, verdict.ranks) == ("skipped_collective", (0,))
    assert "left the loop" in verdict.reason


def test_a_batch_less_than_in_the_epoch_before(launch: Launch) -> None:
    verdict = launch(rank0_has_a_batch_less_in_the_second_epoch, timeout=30).verdict
    assert (verdict.cause, verdict.ranks) == ("skipped_collective", (0,))
    assert "left the loop" in verdict.reason


def test_a_call_left_out_of_one_step(launch: Launch) -> None:
    verdict = launch(rank1_skips_the_loss_of_a_step, timeout=30).verdict
    assert (verdict.cause, verdict.ranks) == ("skipped_collective", (1,))
    assert f"test_order.py:{line_of('the loss')} " in verdict.where


def test_ddp_construction_is_seen(launch: Launch) -> None:
    verdict = launch(rank1_has_a_barrier_of_its_own, timeout=30).verdict
    assert (verdict.outcome, verdict.cause, verdict.ranks) == ("HANG", "extra_collective", (1,))
    assert f"test_order.py:{line_of('the barrier')} " in verdict.where
    assert "ddp_verify_parameters" in verdict.reason


def test_a_receive_without_a_send(launch: Launch) -> None:
    verdict = launch(rank1_never_sends, timeout=30).verdict
    assert verdict.cause == "p2p_unmatched"
    # No earlier round shows whether rank 0 receives too much or rank 1 skips its send.
    assert verdict.ranks in ((0,), (1,))
    assert not verdict.certain
    assert f"test_order.py:{line_of('the receive')} " in verdict.where
