"""Programs in which the first group does not form: address, port, rank, size."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from pytest_nsa.fixtures import Group
from tests_cpu.faults.planting import planted


@planted(2, rank=1)
def test_a_group_of_its_own_that_one_rank_does_not_join(group: Group, tmp_path: Path, culprit: int) -> None:
    dist.barrier()
    dist.destroy_process_group()
    if group.rank != culprit:
        store = dist.FileStore(str(tmp_path / "store"), 2)
        dist.init_process_group("gloo", store=store, rank=group.rank, world_size=2)


@planted(2)
def test_a_host_name_that_resolves_nowhere(group: Group, faulty: bool) -> None:
    served = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    host, seconds = ("no-such-host.invalid", 0.2) if faulty else ("localhost", 60)
    dist.TCPStore(host, served.port, 2, False, timeout=timedelta(seconds=seconds))


@planted(2)
def test_an_interface_that_is_not_there(group: Group, faulty: bool) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "nsa77" if faulty else "lo"
    dist.new_group([0, 1])


def form_again(**arguments: object) -> None:
    dist.destroy_process_group()
    dist.init_process_group("gloo", **arguments)  # type: ignore[arg-type]
    dist.all_reduce(torch.ones(1))


@planted(3)
def test_a_launcher_that_sets_no_rank(group: Group, faulty: bool) -> None:
    """Whichever rank comes first serves the store: the others find its port in use."""
    os.environ["RANK"] = os.environ.get("SLURM_PROCID", "0" if faulty else str(group.rank))
    form_again()


@planted(3, rank=2)
def test_sizes_of_the_world_that_differ(group: Group, culprit: int) -> None:
    os.environ["WORLD_SIZE"] = "4" if group.rank == culprit else "3"
    form_again()


@planted(2)
def test_a_world_that_is_smaller(group: Group, faulty: bool) -> None:
    os.environ["WORLD_SIZE"] = "3" if faulty else "2"
    form_again()


def where():
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


@planted(4, rank=3)
def test_reinit_stale_generation(tmp_path, culprit):
    """After the restart of the group rank 3 still has the old generation's rendezvous file, so neither it nor the others form a group."""
    rank, world = where()
    dist.all_reduce(torch.ones(2))
    dist.barrier()
    generation = 0
    membership_event_seen = rank != culprit
    dist.destroy_process_group()
    generation += int(membership_event_seen)
    path = tmp_path / f"rendezvous-{generation}"
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)  # HERE
    dist.all_reduce(torch.ones(2))
