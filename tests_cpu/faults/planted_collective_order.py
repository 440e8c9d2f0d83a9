"""A bare process group: one rank skips, adds or reorders a collective."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import all_reduce as bound_early

from pytest_nsa.fixtures import Group
from tests_cpu.faults.planting import AT, case, planted, planted_cases


@planted("skipped_collective", [2], n=4, family="skip", origin="held out 2026-11-22")
def test_a_cached_configuration_is_not_broadcast(group: Group, tmp_path: Path) -> None:
    cache = tmp_path / f"config-{group.rank}.json"
    if group.rank == 2:
        cache.write_text("{}")
    for _ in range(3):
        dist.all_reduce(torch.ones(4))
    configuration: list[Any] = [{"lr": 1}]
    if not cache.exists():
        dist.broadcast_object_list(configuration, src=0)
    dist.barrier()


def rounds(group: Group, culprit: int, fault: str) -> None:
    """Six rounds of two collectives; rank ``culprit`` does otherwise in round AT."""
    total, many = torch.ones(4), [torch.zeros(2) for _ in range(group.world_size)]
    for step in range(6):
        is_it = group.rank == culprit and step == AT
        if is_it and fault == "extra":
            dist.barrier()
        if is_it and fault == "swapped":
            dist.all_gather(many, torch.ones(2))
            dist.all_reduce(total)
            continue
        if is_it and fault == "operation":
            dist.broadcast(total, 0)
        elif not (is_it and fault == "skipped"):
            dist.all_reduce(total)
        dist.all_gather(many, torch.ones(2))


@planted_cases(
    "skipped_collective",
    cases={"1_of_2": case(1), "0_of_2": case(0), "2_of_4": case(2, n=4)},
    where="in rounds",
    family="skip",
    origin="first corpus",
)
def test_skips_an_all_reduce(group: Group, culprit: int) -> None:
    rounds(group, culprit, "skipped")


@planted("skipped_collective", [1], family="skip", origin="first corpus")
def test_leaves_before_the_last_barrier(group: Group) -> None:
    dist.all_reduce(torch.ones(1))
    if group.rank == 1:
        return
    dist.barrier()


@planted("skipped_collective", [0], reason="left the loop", family="skip", origin="first corpus")
def test_runs_out_of_data(group: Group) -> None:
    for _ in range(5 + 2 * group.rank):
        bound_early(torch.ones(3))
    dist.broadcast(torch.ones(1), 0)


@planted("skipped_collective", [1], family="skip", origin="first corpus")
def test_skips_a_call_bound_early(group: Group) -> None:
    for step in range(6):
        if not (group.rank == 1 and step == AT):
            bound_early(torch.ones(3))
        dist.barrier()


@planted("skipped_collective", [1], family="skip", origin="first corpus")
def test_skips_an_asynchronous_one(group: Group) -> None:
    for step in range(6):
        works = [dist.all_reduce(torch.ones(3), async_op=True)]
        if not (group.rank == 1 and step == AT):
            works.append(dist.broadcast(torch.ones(2), 0, async_op=True))
        for work in works:
            assert work is not None
            work.wait()


@planted("skipped_collective", [3], n=4, family="skip", origin="first corpus")
def test_skips_a_gather_of_objects(group: Group) -> None:
    for step in range(6):
        if not (group.rank == 3 and step == AT):
            dist.all_gather_object([None] * group.world_size, {"rank": group.rank})
        dist.barrier()


@planted("missing_collective", [1], family="skip", origin="first corpus")
def test_never_comes_and_nobody_knows_why(group: Group) -> None:
    import select

    if group.rank == 1:
        select.select([], [], [], 1000)
    dist.all_reduce(torch.ones(1))


@planted("skipped_collective", [1], family="skip", origin="first corpus")
def test_skips_a_functional_collective(group: Group) -> None:
    from torch.distributed import _functional_collectives as functional

    for step in range(6):
        if not (group.rank == 1 and step == AT):
            functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD) + 1
        dist.barrier()


@planted("skipped_collective", [1], family="skip", origin="first corpus")
def test_skips_a_monitored_barrier(group: Group) -> None:
    from datetime import timedelta

    for step in range(6):
        if not (group.rank == 1 and step == AT):
            dist.monitored_barrier(timeout=timedelta(seconds=600))
        dist.all_reduce(torch.ones(3))


@planted("skipped_collective", [1], family="skip", origin="first corpus")
def test_a_monitored_barrier_complains(group: Group) -> None:
    from datetime import timedelta

    dist.all_reduce(torch.ones(1))
    if group.rank != 1:
        dist.monitored_barrier(timeout=timedelta(seconds=1))


@planted_cases(
    "extra_collective",
    cases={"1_of_2": case(1, miss="two ranks of one kind"), "0_of_4": case(0, n=4)},
    family="extra",
    origin="first corpus",
)
def test_extra_barrier(group: Group, culprit: int) -> None:
    rounds(group, culprit, "extra")


@planted("extra_collective", [1], family="extra", origin="first corpus")
def test_extra_barrier_at_the_end(group: Group) -> None:
    dist.all_reduce(torch.ones(1))
    if group.rank == 1:
        dist.barrier()


@planted("extra_collective", [2], n=3, family="extra", origin="first corpus")
def test_extra_broadcast_at_the_end_of_three(group: Group) -> None:
    dist.all_reduce(torch.ones(1))
    if group.rank == 2:
        dist.broadcast(torch.ones(1), 2)


@planted("collective_mismatch", [1], n=4, family="mismatch", origin="first corpus")
def test_other_operation_of_four(group: Group) -> None:
    rounds(group, 1, "operation")


@planted_cases(
    "collective_mismatch", cases={"0_of_2": case(0), "3_of_4": case(3, n=4)}, family="swap", origin="first corpus"
)
def test_other_order(group: Group, culprit: int) -> None:
    rounds(group, culprit, "swapped")


def studied(objective: Callable[[], None], rounds: int) -> None:
    for _ in range(rounds):
        objective()


def suggested(value: int) -> int:
    given = [value]
    dist.broadcast_object_list(given, src=0)  # HERE
    return given[0]


@planted("extra_collective", [2], n=3, marked=True, family="extra", origin="unseen 2026-11-28")
def test_a_study_that_rank_0_leads(group: Group) -> None:
    """Rank 0 comes to the objective by other lines than the others, of which one asks for a value more."""

    def objective() -> None:
        if suggested(16) * 2 > (40, 40, 20)[group.rank]:
            suggested(4)  # HERE
        for _ in range(4):
            dist.all_reduce(torch.ones(3))

    if group.rank == 0:
        studied(objective, rounds=4)
    else:
        for _ in range(4):
            objective()
