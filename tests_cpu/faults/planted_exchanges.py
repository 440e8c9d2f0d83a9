"""Messages, orders and groups that look like another fault: one message more, an order that values decide, a name of two groups.

After programs whose authors had not read the rules. HERE marks the lines that a verdict may name.
"""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist
from torch import nn

from tests_cpu.faults.planting import AT, planted


def default_store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


# Messages


@planted("p2p_unmatched", [1], n=3, marked=True)
def test_a_stage_that_cools_down_once_too_often(group):
    """Each stage sends what it has computed on, and waits for as many gradients; the one in the middle for one more."""
    here, batches = torch.empty(4), 3
    for _ in range(batches):
        if group.rank:
            dist.recv(here, src=group.rank - 1)
        if group.rank < 2:
            dist.send(torch.ones(4), dst=group.rank + 1)
    for _ in range(batches + (group.rank == 1)):
        if group.rank < 2:
            dist.recv(here, src=group.rank + 1)  # HERE
        if group.rank:
            dist.send(torch.ones(4), dst=group.rank - 1)
    dist.barrier()


@planted("p2p_unmatched", [3], n=4, marked=True, miss="who is ahead in a circle")
def test_the_last_stage_waits_for_a_batch_and_all_others_for_its_gradient(group):
    here = torch.empty(4)
    for _ in range(4 if group.rank == 3 else 3):
        if group.rank:
            dist.recv(here, src=group.rank - 1)  # HERE
        if group.rank < 3:
            dist.send(torch.ones(4), dst=group.rank + 1)
    for _ in range(3):
        if group.rank < 3:
            dist.recv(here, src=group.rank + 1)
        if group.rank:
            dist.send(torch.ones(4), dst=group.rank - 1)


@planted("p2p_unmatched", [2, 3], n=4, marked=True)
def test_a_number_in_the_group_is_taken_for_one_of_all(group):
    """Two pipelines of two stages: the ranks of the second send to the first's, whose numbers theirs are in their group."""
    pipes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    stage, here = dist.get_rank(pipes[group.rank // 2]), torch.ones(6)
    for _ in range(3):
        if stage == 0:
            dist.send(here, dst=stage + 1)  # HERE
        else:
            dist.recv(here, src=stage - 1)  # HERE
    dist.barrier()


@planted("p2p_unmatched", [2], n=3, marked=True)
def test_a_worker_that_counts_an_epoch_as_a_step(group):
    here = torch.ones(4)
    if group.rank == 0:
        for step in range(8):
            for worker in (1, 2):
                dist.recv(here, src=worker, tag=step)  # HERE
            for worker in (1, 2):
                dist.send(here, dst=worker, tag=step)
        return
    step = 0
    while step < 8:
        step += (group.rank, step) == (2, 5)
        dist.send(here, dst=0, tag=step)  # HERE
        dist.recv(here, src=0, tag=step)  # HERE
        step += 1


@planted("p2p_unmatched", [0], n=4, marked=True)
def test_a_receive_from_any_rank_took_what_another_waits_for(group):
    here = torch.ones(4)
    if group.rank == 0:
        dist.recv(here)  # HERE
        for worker in (1, 2, 3):
            dist.recv(here, src=worker)  # HERE
    else:
        if group.rank > 1:
            default_store().wait(["first"])
        dist.send(here, dst=0)
        default_store().set("first", "1")
    dist.barrier()


# Orders


class Mean:
    def __init__(self, value: float) -> None:
        self.value = value

    def sync(self) -> float:
        x = torch.tensor([self.value, 1.0])
        dist.all_reduce(x)  # HERE
        return float(x[0] / x[1])


class All:
    def __init__(self, value: float) -> None:
        self.value = value

    def sync(self) -> list[float]:
        parts = [torch.zeros(1) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, torch.tensor([self.value]))  # HERE
        return torch.cat(parts).tolist()


@planted("collective_mismatch", [2], n=3, marked=True, miss="an order by values")
def test_metrics_in_the_order_of_their_values(group):
    for epoch in range(5):
        loss = 0.1 if (group.rank, epoch) == (2, AT) else 1.0
        metrics = {"loss": Mean(loss), "recall": All(0.5)}
        dist.barrier()
        for name in sorted(metrics, key=lambda name: -metrics[name].value):
            metrics[name].sync()  # HERE


@planted("collective_mismatch", [1], n=3, marked=True, miss="an order by values")
def test_metrics_in_the_order_of_their_first_batch(group):
    book: dict[str, Mean | All] = {}
    for kind in (All, Mean) if group.rank == 1 else (Mean, All):
        book[kind.__name__] = kind(1.0)
    dist.all_reduce(torch.ones(3))
    _ = {name: metric.sync() for name, metric in book.items()}


@planted("collective_mismatch", [0], n=3, marked=True)
def test_calls_that_are_begun_in_another_order_from_a_step_on(group):
    """What a step begins is waited for a step later: all have begun as many calls when they wait."""
    before: list[dist.Work] = []
    for step in range(6):
        x, parts = torch.ones(16), [torch.zeros(1) for _ in range(3)]
        begin = [
            lambda x=x: dist.all_reduce(x, async_op=True),  # HERE
            lambda parts=parts: dist.all_gather(parts, torch.ones(1), async_op=True),  # HERE
        ]
        if group.rank == 0 and step >= AT:
            begin.reverse()
        begun = [call() for call in begin]
        for work in before:
            work.wait()
        before = begun
    for work in before:
        work.wait()


# Groups


@planted("init_timeout", [2], n=3, marked=True)
def test_groups_that_their_members_alone_make_on_demand(group):
    """torch numbers groups as a rank makes them: to rank 2 the group with rank 0 is the first, to rank 0 the second."""
    made: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def of(*members: int) -> dist.ProcessGroup:
        if members not in made:
            made[members] = dist.new_group(list(members))  # HERE
        return made[members]

    if group.rank in (0, 1):
        dist.all_reduce(torch.ones(1), group=of(0, 1))  # HERE
    if group.rank in (0, 2):
        dist.all_reduce(torch.ones(1), group=of(0, 2))
    dist.barrier()


@planted("skipped_collective", [4], n=6, marked=True)
def test_a_leader_leaves_out_the_call_between_nodes_and_its_node_ends(group):
    nodes = [[0, 1], [2, 3], [4, 5]]
    within, leaders = [dist.new_group(node) for node in nodes], dist.new_group([0, 2, 4])
    node = group.rank // 2
    for step in range(6):
        x = torch.ones(4)
        dist.all_reduce(x, group=within[node])
        if group.rank == nodes[node][0] and not (group.rank == 4 and step >= AT):
            dist.all_reduce(x, group=leaders)  # HERE
        dist.broadcast(x, src=nodes[node][0], group=within[node])


@planted("hook_deadlock", [2], n=3, marked=True)
def test_a_frozen_layer_whose_hook_does_not_run(group):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def told(gradient: torch.Tensor) -> None:
        dist.all_reduce(gradient.norm())  # HERE

    model[0].weight.register_hook(told)
    for step in range(4):
        model[0].weight.requires_grad_(not (group.rank == 2 and step == AT))
        model(torch.ones(2, 4)).sum().backward()


# Loops


class Lanes:
    """Takes from lanes in turn, every ``stride``-th."""

    def __init__(self, stride: int) -> None:
        self.lanes, self.at, self.stride = [deque(range(3)), deque(range(3 * stride))], 0, stride

    def take(self) -> int:
        while True:  # HERE
            lane = self.lanes[self.at % len(self.lanes)]  # HERE
            self.at += self.stride  # HERE
            if lane:  # HERE
                return lane.popleft()


@planted("infinite_loop", [1], marked=True)
def test_a_stride_that_passes_by_the_lanes_with_work(group):
    """The loop gives the interpreter's lock up at one instruction only: it looks like one call into native code."""
    lanes = Lanes(2 if group.rank == 1 else 1)
    for _ in range(6):
        dist.all_reduce(torch.tensor(float(lanes.take())))


def packed(lengths: list[int], room: int):
    while lengths:  # HERE
        bin_: list[int] = []
        for n in list(lengths):  # HERE
            if sum(bin_) + n <= room:  # HERE
                bin_.append(n)
                lengths.remove(n)
        if bin_:  # HERE
            yield bin_


@planted("infinite_loop", [1], marked=True)
def test_a_document_that_no_bin_has_room_for(group):
    lengths = [30, 60, 90, 20, 300 if group.rank == 1 else 40]
    for bin_ in packed(lengths, 100):  # HERE
        dist.all_reduce(torch.tensor(float(len(bin_))))


@planted("infinite_loop", [2], n=3, marked=True, reason="goes round")
def test_a_search_that_calls_the_model_and_finds_nothing(group):
    """Each attempt is a forward: the rank moves for ever, and gets nowhere."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False)
    for shard in range(4):
        x = torch.zeros(6, 3) if (group.rank, shard) == (2, AT) else torch.randn(6, 3)
        rate, loss = 1.0, model(x).square().mean()
        while not model(x * (1 - rate)).square().mean() < loss:  # HERE
            rate = max(rate / 2, 1e-6)  # HERE
        dist.all_reduce(torch.tensor(rate))
