"""Planted: ranks that disagree on the order of collectives, in a bare group."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import all_reduce as bound_early

from pytest_nsa.fixtures import DDP, Group
from tests_cpu.faults.planting import AT, planted


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
        if is_it and fault == "shape":
            dist.all_reduce(torch.ones(5))
        elif is_it and fault == "dtype":
            dist.all_reduce(torch.ones(4, dtype=torch.float64))
        elif is_it and fault == "dtype of equal size":
            dist.all_reduce(torch.ones(4, dtype=torch.int32))
        elif is_it and fault == "operation":
            dist.broadcast(total, 0)
        elif not (is_it and fault == "skipped"):
            dist.all_reduce(total)
        dist.all_gather(many, torch.ones(2))


@planted("skipped_collective", [1], where="in rounds")
def test_skips_an_all_reduce(group: Group) -> None:
    rounds(group, 1, "skipped")


@planted("skipped_collective", [0])
def test_skips_an_all_reduce_on_rank_0(group: Group) -> None:
    rounds(group, 0, "skipped")


@planted("skipped_collective", [2], n=4)
def test_skips_an_all_reduce_of_four(group: Group) -> None:
    rounds(group, 2, "skipped")


@planted("skipped_collective", [1])
def test_leaves_before_the_last_barrier(group: Group) -> None:
    dist.all_reduce(torch.ones(1))
    if group.rank == 1:
        return
    dist.barrier()


@planted("skipped_collective", [0], reason="left the loop")
def test_runs_out_of_data(group: Group) -> None:
    for _ in range(5 + 2 * group.rank):
        bound_early(torch.ones(3))
    dist.broadcast(torch.ones(1), 0)


@planted("skipped_collective", [1])
def test_skips_a_call_bound_early(group: Group) -> None:
    for step in range(6):
        if not (group.rank == 1 and step == AT):
            bound_early(torch.ones(3))
        dist.barrier()


@planted("skipped_collective", [1])
def test_skips_an_asynchronous_one(group: Group) -> None:
    for step in range(6):
        works = [dist.all_reduce(torch.ones(3), async_op=True)]
        if not (group.rank == 1 and step == AT):
            works.append(dist.broadcast(torch.ones(2), 0, async_op=True))
        for work in works:
            assert work is not None
            work.wait()


@planted("skipped_collective", [3], n=4)
def test_skips_a_gather_of_objects(group: Group) -> None:
    for step in range(6):
        if not (group.rank == 3 and step == AT):
            dist.all_gather_object([None] * group.world_size, {"rank": group.rank})
        dist.barrier()


@planted("extra_collective", [1])
def test_extra_barrier(group: Group) -> None:
    rounds(group, 1, "extra")


@planted("extra_collective", [0], n=4)
def test_extra_barrier_of_four(group: Group) -> None:
    rounds(group, 0, "extra")


@planted("extra_collective", [1])
def test_extra_barrier_at_the_end(group: Group) -> None:
    dist.all_reduce(torch.ones(1))
    if group.rank == 1:
        dist.barrier()


@planted("extra_collective", [2], n=3)
def test_extra_broadcast_at_the_end_of_three(group: Group) -> None:
    dist.all_reduce(torch.ones(1))
    if group.rank == 2:
        dist.broadcast(torch.ones(1), 2)


@planted("collective_mismatch", [1])
def test_other_shape(group: Group) -> None:
    rounds(group, 1, "shape")


@planted("collective_mismatch", [0])
def test_other_dtype(group: Group) -> None:
    rounds(group, 0, "dtype")


@planted("collective_mismatch", [1])
def test_other_dtype_of_equal_size(group: Group) -> None:
    rounds(group, 1, "dtype of equal size")


@planted("collective_mismatch", [1], n=4)
def test_other_operation_of_four(group: Group) -> None:
    rounds(group, 1, "operation")


@planted("collective_mismatch", [0])
def test_other_order(group: Group) -> None:
    rounds(group, 0, "swapped")


@planted("collective_mismatch", [3], n=4)
def test_other_order_of_four(group: Group) -> None:
    rounds(group, 3, "swapped")


@planted("group_order_deadlock", [0, 1])
def test_two_groups_in_opposite_order(group: Group) -> None:
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    for chosen in (first, second) if group.rank else (second, first):
        dist.all_reduce(torch.ones(1), group=chosen)


@planted("group_order_deadlock", [0, 1, 2, 3], n=4)
def test_a_ring_of_groups(group: Group) -> None:
    pairs = [sorted({r, (r + 1) % 4}) for r in range(4)]
    groups = [dist.new_group(pair) for pair in pairs]
    for index in (group.rank, (group.rank - 1) % 4):  # each waits for its right before its left
        dist.all_reduce(torch.ones(1), group=groups[index])


@planted("p2p_unmatched", [0, 1])
def test_both_receive(group: Group) -> None:
    dist.recv(torch.ones(2), 1 - group.rank)
    dist.send(torch.ones(2), 1 - group.rank)


@planted("p2p_unmatched", [0])
def test_receives_what_nobody_sends(group: Group) -> None:
    dist.barrier()
    if group.rank == 0:
        dist.recv(torch.ones(2), 1)


@planted("p2p_unmatched", [1, 2], n=4)
def test_two_of_four_receive_from_each_other(group: Group) -> None:
    if group.rank in (1, 2):
        dist.recv(torch.ones(2), 3 - group.rank)
    dist.barrier()


@planted("missing_collective", [1])
def test_never_comes_and_nobody_knows_why(group: Group) -> None:
    import select

    if group.rank == 1:
        select.select([], [], [], 1000)
    dist.all_reduce(torch.ones(1))


@planted("init_timeout", [1])
def test_a_new_group_that_one_rank_does_not_make(group: Group) -> None:
    import select

    if group.rank == 1:
        select.select([], [], [], 1000)
    dist.new_group([0, 1])


@planted("skipped_collective", [1])
def test_skips_a_functional_collective(group: Group) -> None:
    from torch.distributed import _functional_collectives as functional

    for step in range(6):
        if not (group.rank == 1 and step == AT):
            functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD) + 1
        dist.barrier()


@planted("skipped_collective", [1])
def test_skips_a_monitored_barrier(group: Group) -> None:
    from datetime import timedelta

    for step in range(6):
        if not (group.rank == 1 and step == AT):
            dist.monitored_barrier(timeout=timedelta(seconds=600))
        dist.all_reduce(torch.ones(3))


@planted("skipped_collective", [1])
def test_a_monitored_barrier_complains(group: Group) -> None:
    from datetime import timedelta

    dist.all_reduce(torch.ones(1))
    if group.rank != 1:
        dist.monitored_barrier(timeout=timedelta(seconds=1))


@planted("init_timeout", [1])
def test_a_group_of_its_own_that_one_rank_does_not_join(group: Group, tmp_path: Path) -> None:
    dist.barrier()
    dist.destroy_process_group()
    if group.rank == 0:
        store = dist.FileStore(str(tmp_path / "store"), 2)
        dist.init_process_group("gloo", store=store, rank=0, world_size=2)


@planted("hook_deadlock", [0, 1])
def test_collectives_in_gradient_hooks_in_another_order(group: Group) -> None:
    first, second = torch.ones(3, requires_grad=True), torch.ones(5, requires_grad=True)
    for x in (first, second):
        x.register_hook(lambda gradient: dist.all_reduce(gradient))
    total = first.sum() + second.sum() if group.rank else second.sum() + first.sum()
    total.backward()


@planted("hook_deadlock", [1])
def test_a_collective_in_a_gradient_hook_of_one_rank(ddp: DDP) -> None:
    from tests_cpu.faults.planting import Net, net, train

    model = ddp.wrap(net())
    inner = model.module
    assert isinstance(inner, Net)

    def plant() -> None:
        inner.blocks[1].in_backward = lambda: dist.all_reduce(torch.ones(7))

    train(model, ddp.rank, culprit=1, before=plant)


@planted(
    "collective_mismatch",
    [1],
    n=3,
    reason="rank 1 gives 2 to rank 0, which takes 1; rank 1 gives 2 to rank 2, which takes 1",
)
def test_split_sizes_that_do_not_agree(group: Group) -> None:
    gives = [2, 1, 2] if group.rank == 1 else [1, 1, 1]
    out = torch.empty(3, 4)
    dist.all_to_all_single(out, torch.ones(sum(gives), 4), [1, 1, 1], gives)
    dist.barrier()
