"""What ranks did before they failed, and what is true of each rank alone: reason and advice follow from it."""

# options: -o ranks_hang_after=4
import time

import pytest
import torch
import torch.distributed as dist


class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.a(x) if x.sum() > 0 else self.b(x)


def test_branches(ddp):  # -> ? ?: on rank 1 parameters took no part in the last backward: a.weight, a.bias
    model = ddp.wrap(Branches())
    for _ in range(2):
        model(torch.ones(2, 4) * (-1) ** ddp.rank).sum().backward()


def test_group_of_exceptions(group):  # -> assertion 0,1: different errors or values
    raise ExceptionGroup("files", [ValueError("bad header") if group.rank else OSError("disk full")])


def test_alike(group):  # -> assertion 0,1: no rank differs
    assert group.world_size == 3


def test_a_nan_that_is_meant(ddp):  # -> assertion 1
    loss = ddp.wrap(torch.nn.Linear(4, 1))(torch.full((2, 4), float("nan"))).sum()
    loss.backward()
    assert torch.isnan(loss)
    assert ddp.rank == 0


def test_skipped_on_one(group):  # -> FAIL ? 1 here: what all ranks know
    if group.rank == 1:
        pytest.skip("no data")  # HERE


# A file that was written after it was not found.
def wait_for(path):
    while not path.exists():
        time.sleep(0.01)


def test_reads_at_once(group, tmp_path):  # -> rank_exception 1: before its writer was done
    if group.rank == 0:
        wait_for(tmp_path / "has read")
        (tmp_path / "shard").write_text("1 2 3")
    else:
        try:
            (tmp_path / "shard").read_text()
        finally:
            (tmp_path / "has read").touch()
    dist.barrier()


# An exception that was handled and kept.
def read(group):
    error = None
    for attempt in range(3):
        try:
            return int("1" if group.rank or attempt else "one")
        except ValueError as caught:
            error = caught
            if group.rank == 0:
                break
    while error is not None:
        time.sleep(0.05)


def test_tries_again(group, tmp_path):  # -> sleeping 1: and handles FileExistsError: File exists
    if group.rank == 0:
        (tmp_path / "lock").mkdir()
    dist.barrier()
    while group.rank == 1:
        try:
            (tmp_path / "lock").mkdir()
            break
        except FileExistsError:
            time.sleep(0.02)
    dist.barrier()


def test_waits_after_an_error(group):  # -> sleeping 0 with handled_exception
    read(group)
    dist.barrier()
