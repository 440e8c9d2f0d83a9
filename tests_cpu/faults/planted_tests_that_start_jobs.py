"""Tests that start a job by themselves: addresses, ports, ranks and sizes of its group."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pytest_nsa.fixtures import Group
from tests_cpu.faults.planting import planted


@planted("data_dependent_branch", [1], n=3, reason="old fabric", family="branch", origin="held out 2026-11-22")
def test_expected_to_fail_on_one_rank(group: Group) -> None:
    dist.all_reduce(torch.ones(1))
    if group.rank == 1:
        pytest.xfail("this host has an old fabric")
    dist.all_reduce(torch.ones(1))


@planted("init_timeout", [1], family="meeting", origin="first corpus")
def test_a_group_of_its_own_that_one_rank_does_not_join(group: Group, tmp_path: Path) -> None:
    dist.barrier()
    dist.destroy_process_group()
    if group.rank == 0:
        store = dist.FileStore(str(tmp_path / "store"), 2)
        dist.init_process_group("gloo", store=store, rank=0, world_size=2)


@planted("network_unusable", [0], reason="is in use by another process", family="meeting", origin="network")
def test_a_port_that_is_taken(group: Group) -> None:
    if group.rank == 0:
        taken = socket.create_server(("127.0.0.1", 0))
        dist.TCPStore("127.0.0.1", taken.getsockname()[1], 1, True, timeout=timedelta(seconds=2))
    dist.barrier()


@planted(
    "network_unusable",
    [0, 1],
    reason="the host name no-such-host.invalid resolves to no address",
    family="meeting",
    origin="network",
)
def test_a_host_name_that_resolves_nowhere(group: Group) -> None:
    dist.TCPStore("no-such-host.invalid", 29555, 2, False, timeout=timedelta(seconds=0.2))


@planted(
    "init_timeout",
    [0],
    reason="tries to reach the rendezvous host of a group, or waits there for other ranks",
    family="meeting",
    origin="network",
)
def test_a_store_that_waits_for_a_rank_that_does_not_come(group: Group) -> None:
    if group.rank == 0:
        dist.TCPStore("127.0.0.1", 0, 2, True, timeout=timedelta(seconds=200))
    dist.barrier()


@planted(
    "network_unusable", [0, 1], reason="GLOO_SOCKET_IFNAME=nsa77 names no interface", family="meeting", origin="network"
)
def test_an_interface_that_is_not_there(group: Group) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "nsa77"
    dist.new_group([0, 1])


def form_again(**arguments: object) -> None:
    dist.destroy_process_group()
    dist.init_process_group("gloo", **arguments)  # type: ignore[arg-type]
    dist.all_reduce(torch.ones(1))


@planted(
    "init_timeout",
    [2],
    n=3,
    where="in form_again",
    reason="ranks 0 and 2 claim to be rank 0 of 3",
    family="meeting",
    origin="network",
)
def test_the_number_within_a_node(group: Group, tmp_path: Path) -> None:
    place = f"file://{tmp_path.parent / 'again'}"
    form_again(init_method=place, rank=group.rank % 2, world_size=3)


@planted(
    "init_timeout",
    [1, 2],
    n=3,
    where="in form_again",
    reason="all 3 ranks claim to be rank 0 of 3",
    family="meeting",
    origin="network",
)
def test_a_launcher_that_sets_no_rank(group: Group) -> None:
    """Whichever rank comes first serves the store: the others find its port in use."""
    os.environ["RANK"] = os.environ.get("SLURM_PROCID", "0")
    form_again()


@planted(
    "init_timeout",
    [2],
    n=3,
    where="in form_again",
    reason="ranks 0 and 1 expect 3 ranks; rank 2 expects 4 ranks",
    family="meeting",
    origin="network",
)
def test_sizes_of_the_world_that_differ(group: Group) -> None:
    os.environ["WORLD_SIZE"] = "4" if group.rank == 2 else "3"
    form_again()


@planted(
    "init_timeout",
    [0, 1],
    where="in form_again",
    reason="the group expects 3 ranks, but there are 2",
    family="meeting",
    origin="network",
)
def test_a_world_that_is_smaller(group: Group) -> None:
    os.environ["WORLD_SIZE"] = "3"
    form_again()


def where():
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


@planted("init_timeout", [3], n=4, marked=True, family="meeting", origin="bug reports 2026-11-23")
def test_reinit_stale_generation(tmp_path):
    """After the restart of the group rank 3 still has the old generation's rendezvous file, so neither it nor the others form a group."""
    rank, world = where()
    dist.all_reduce(torch.ones(2))
    dist.barrier()
    generation = 0
    membership_event_seen = rank != 3
    dist.destroy_process_group()
    generation += int(membership_event_seen)
    path = tmp_path / f"rendezvous-{generation}"
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)  # HERE
    dist.all_reduce(torch.ones(2))
