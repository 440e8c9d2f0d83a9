"""Several groups, or the dimensions of a mesh: one rank skips, adds or reorders a call among them."""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from pytest_nsa.fixtures import Group
from tests_cpu.faults.planting import AT, planted


class Meter:
    def __init__(self) -> None:
        self.values = torch.zeros(3)

    def sync(self) -> None:
        dist.all_reduce(self.values)


@planted(
    "skipped_collective",
    [2],
    n=4,
    marked=True,
    reason="the call at test_planted.py:",
    family="skip",
    origin="generated 2026-11-23",
    miss="the line: the first of a round's calls in several groups",
)
def test_a_round_of_two_groups_is_cut_short(group):
    mine = [dist.new_group([0, 1]), dist.new_group([2, 3])][group.rank >= 2]
    meter = Meter()
    for step in range(6):
        dist.all_reduce(torch.ones(5))
        if (group.rank, step) == (2, AT):
            continue
        dist.all_reduce(torch.ones(2), group=mine)  # HERE
        meter.sync()
        dist.broadcast(torch.ones(4), 0)


@planted("skipped_collective", [1, 2], n=4, marked=True, family="skip", origin="generated 2026-11-23")
def test_two_ranks_take_the_group_of_another_node(group):
    nodes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for step in range(10):
        gradient = torch.ones(6)
        if step < 4:
            dist.all_reduce(gradient)
        else:
            dist.all_reduce(gradient, group=nodes[group.rank % 2])  # HERE
        if step % 3 == 2:
            dist.all_reduce(gradient.norm())


@planted("skipped_collective", [4], n=5, marked=True, family="skip", origin="generated 2026-11-23")
def test_the_last_call_of_a_round_of_two_groups(group):
    mine = [dist.new_group([0, 1]), dist.new_group([2, 3, 4])][group.rank >= 2]
    for step in range(6):
        dist.all_reduce(torch.ones(2), group=mine)
        dist.broadcast(torch.ones(3), 0)
        if (group.rank, step) != (4, AT):
            dist.barrier()  # HERE


@planted("skipped_collective", [4], n=6, marked=True, family="skip", origin="unseen 2026-11-25")
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


@planted("skipped_collective", [1], n=4, where="test_planted.py", family="skip", origin="review")
def test_a_call_of_a_pair_is_skipped(group: Group) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    if group.rank != 1:
        dist.all_reduce(torch.ones(2), group=pairs[group.rank // 2])
    dist.barrier()


def where():
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


@planted("skipped_collective", [1], n=4, marked=True, family="skip", origin="bug reports 2026-11-23")
def test_mesh_spike_filter():
    """Rank 1 skips a step by its own overflow check, before the tensor-parallel reduction that its row waits in."""
    rank, _ = where()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp, dp = mesh.get_group("tp"), mesh.get_group("dp")
    torch.manual_seed(rank)
    weight = torch.randn(8, 8)
    for step in range(6):
        x = torch.randn(4, 8)
        if rank == 1 and step == 3:
            x[0] = float("inf")
        partial = x @ weight
        if not torch.isfinite(partial).all():
            continue  # HERE
        dist.all_reduce(partial, group=tp)  # HERE
        grad = x.t() @ partial
        dist.all_reduce(grad, group=dp)  # HERE
        weight = weight - 1e-4 * grad / grad.norm()
    dist.barrier()  # HERE


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


@planted("skipped_collective", [3], n=4, marked=True, family="skip", origin="bug reports 2026-11-23")
def test_replicas_report(group):
    reporter = ReplicaReporter(group.rank)
    gradient = torch.ones(8)
    for step in range(16):
        outlier = group.rank == 3 and step >= 10  # filtered: the loss of its shard is out of range from here on
        reporter.note(loss=1.0 / (step + 1), wanted=not outlier)
        reporter.flush()  # HERE
        dist.all_reduce(gradient)  # HERE
        gradient /= group.world_size


@planted("skipped_collective", [2], n=6, marked=True, family="skip", origin="generated 2026-11-25")
def test_one_of_many_leaves_out_what_no_round_before_had(group):
    rows = [dist.new_group([r, r + 1]) for r in range(0, 6, 2)]
    for step in range(5):
        dist.all_reduce(torch.ones(4), group=rows[group.rank // 2])
        if step == 2 and group.rank != 2:
            dist.all_reduce(torch.ones(1))  # HERE


@planted("skipped_collective", [3], n=4, marked=True, family="skip", origin="unseen 2026-11-26")
def test_the_first_call_of_a_group_of_two(group):
    """Neither member has called in it before: a group is made for calls."""
    ends = dist.new_group([0, 3])
    is_tied = group.rank == 0
    for _ in range(4):
        if is_tied:
            dist.all_reduce(torch.ones(20), group=ends)  # HERE
        dist.all_reduce(torch.ones(1))


@planted("skipped_collective", [5], n=6, marked=True, family="skip", origin="unseen 2026-11-26")
def test_the_first_call_of_a_group_of_two_whose_like_has_ended(group):
    """The ranks that wait are in groups without those that ended their tests."""
    whole = [dist.new_group([0, 1, 2]), dist.new_group([3, 4, 5])][group.rank // 3]
    ends = [dist.new_group([0, 2]), dist.new_group([3, 5])][group.rank // 3]
    for step in range(3):
        if step and group.rank % 3 != 1 and group.rank != 5:
            dist.all_reduce(torch.ones(8), group=ends)  # HERE
        dist.all_reduce(torch.ones(1), group=whole)


@planted("skipped_collective", [3], n=4, marked=True, family="skip", origin="unseen 2026-11-25")
def test_a_server_does_not_take_a_tied_weight(group):
    """The one beside it has, and waits where it does."""
    serving, training = dist.new_group([0, 2, 3]), dist.new_group([0, 1])
    names = ["embed", "block", "norm", "head"]
    for _round in range(2):
        for name in names:
            if group.rank == 0 or (group.rank > 1 and (name, group.rank) != ("head", 3)):
                dist.broadcast(torch.ones(16), 0, group=serving)  # HERE
            if group.rank < 2:
                dist.barrier(group=training)
        dist.all_gather([torch.empty(4) for _ in range(4)], torch.ones(4))


@planted(
    "group_order_deadlock",
    [0],
    n=3,
    marked=True,
    miss="who is not in the circle",
    family="swap",
    origin="unseen 2026-11-25",
)
def test_a_third_rank_waits_at_the_end_for_two_in_a_circle(group):
    both = [dist.new_group([0, 1]) for _ in range(2)]
    if group.rank < 2:
        for step in range(5):
            for pair in reversed(both) if (group.rank, step) == (0, AT) else both:
                dist.all_reduce(torch.ones(8), group=pair)  # HERE
    dist.barrier()


def ranks():
    return dist.get_rank(), dist.get_world_size()


class SequenceParallelNorm:
    """Gathers the statistics of the sequence group and the loss scale of the world."""

    def __init__(self, group, members, rank):
        self.group, self.inside, self.rank = group, rank in members, rank
        self.members = members

    def sequence(self, x):
        if self.inside:
            parts = [torch.empty_like(x) for _ in self.members]
            dist.all_gather(parts, x, group=self.group)  # HERE
            x = torch.cat(parts).mean(0, keepdim=True).expand_as(x).contiguous()
        return x

    def scale(self, x):
        s = x.abs().max()
        dist.all_reduce(s, op=dist.ReduceOp.MAX)  # HERE
        return x / s

    def __call__(self, x, fused):
        return self.sequence(self.scale(x)) if fused else self.scale(self.sequence(x))


@planted("group_order_deadlock", [2], n=4, marked=True, family="swap", origin="bug reports 2026-11-23")
def test_fused_norm_swaps_groups():
    """On rank 2 the fused kernel is chosen in step 3 (its block is contiguous), which scales over the world before it gathers over the sequence group; ranks 0 and 1 gather first."""
    rank, _ = ranks()
    members = [0, 1, 2]
    group = dist.new_group(members)
    norm = SequenceParallelNorm(group, members, rank)
    for step in range(6):
        x = torch.rand(4, 6) + 0.1
        if rank != 2 or step < 3:
            x = x.t().contiguous().t()
        y = norm(x.contiguous(), fused=x.is_contiguous())  # HERE
        assert torch.isfinite(y).all()


@planted("group_order_deadlock", [2], n=3, family="swap", origin="held out 2026-11-22")
def test_a_pair_and_all_in_another_order(group: Group) -> None:
    pair = dist.new_group([0, 2])
    if group.rank == 2:
        dist.all_reduce(torch.ones(3), group=pair)
        dist.all_reduce(torch.ones(3))
    else:
        dist.all_reduce(torch.ones(3))
        if group.rank == 0:
            dist.all_reduce(torch.ones(3), group=pair)


def of_the_pair(pair: Any) -> None:
    dist.all_reduce(torch.ones(3), group=pair)


def of_all() -> None:
    dist.barrier()


@planted(
    "group_order_deadlock", [1], n=4, miss="the order of two functions", family="swap", origin="held out 2026-11-22"
)
def test_a_pair_and_all_in_functions_of_their_own(group: Group) -> None:
    pair = dist.new_group([1, 2])
    calls = [of_all, *([functools.partial(of_the_pair, pair)] if group.rank in (1, 2) else [])]
    if group.rank == 1:
        calls.reverse()
    for call in calls:
        call()


@planted("group_order_deadlock", [2], n=4, family="swap", origin="held out 2026-11-22")
def test_a_pair_and_all_change_places_in_a_round(group: Group) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]

    def of_mine() -> None:
        dist.all_reduce(torch.ones(4), group=pairs[group.rank // 2])

    def norm() -> None:
        dist.all_reduce(torch.ones(1))

    for step in range(3):
        calls = (norm, of_mine) if (group.rank, step) == (2, 2) else (of_mine, norm)
        for call in calls:
            call()


@planted(
    "group_order_deadlock",
    [0],
    n=4,
    marked=True,
    reason="smaller group",
    family="swap",
    origin="unseen 2026-11-26",
    miss="the order of two functions",
)
def test_the_ends_share_a_weight_and_one_is_early(group):
    ends = dist.new_group([0, 3])
    for step in range(7):
        dist.all_reduce(torch.ones(8))
        is_early = group.rank == 0 and step >= AT  # HERE
        if is_early:
            dist.all_reduce(torch.ones(20), group=ends)  # HERE
        dist.all_reduce(torch.zeros(1), op=dist.ReduceOp.MAX)
        if group.rank in (0, 3) and not is_early:
            dist.all_reduce(torch.ones(20), group=ends)


log = logging.getLogger("trainer")


# Groups taken in the order of a dictionary, which a helper reverses on half of the ranks "to balance the links"
# (apex PR 18: ranks cycle over types in different orders). Each rank waits for one that waits elsewhere.
def synchronisation_plan(mesh) -> dict[str, dist.ProcessGroup]:
    plan = {axis: mesh[axis].get_group() for axis in ("data", "tensor")}
    coordinate = mesh.get_coordinate()
    if sum(coordinate) % 2:  # HERE
        plan = {axis: plan[axis] for axis in reversed(plan)}  # HERE
    return plan


@planted("group_order_deadlock", [0, 1, 2, 3], n=4, marked=True, family="swap", origin="apex#18")
def test_two_axes_of_a_mesh(group):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    plan = synchronisation_plan(mesh)
    norm = torch.ones(1)
    for axis, process_group in plan.items():
        log.debug("%s", axis)
        dist.all_reduce(norm, group=process_group)  # HERE
    dist.barrier()
    assert norm.item() == group.world_size


@planted("group_order_deadlock", [0, 1], family="swap", origin="first corpus")
def test_two_groups_in_opposite_order(group: Group) -> None:
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    for chosen in (first, second) if group.rank else (second, first):
        dist.all_reduce(torch.ones(1), group=chosen)


@planted("group_order_deadlock", [0, 1, 2, 3], n=4, family="swap", origin="first corpus")
def test_a_ring_of_groups(group: Group) -> None:
    pairs = [sorted({r, (r + 1) % 4}) for r in range(4)]
    groups = [dist.new_group(pair) for pair in pairs]
    for index in (group.rank, (group.rank - 1) % 4):  # each waits for its right before its left
        dist.all_reduce(torch.ones(1), group=groups[index])


class BucketFlusher:
    """Reduces the pending gradients of both mesh dimensions, the larger first."""

    def __init__(self, mesh):
        self.mesh, self.pending = mesh, {}

    def push(self, dim, grad):
        self.pending.setdefault(dim, []).append(grad)

    def flush(self):
        order = sorted(self.pending, key=lambda d: (-len(self.pending[d]), d))
        for dim in order:
            flat = torch.stack([g.sum() for g in self.pending[dim]]).sum().view(1)
            dist.all_reduce(flat, group=self.mesh.get_group(dim))  # HERE
        self.pending.clear()


@planted(
    "group_order_deadlock",
    [0, 3],
    n=4,
    marked=True,
    miss="two ranks of one kind",
    family="swap",
    origin="bug reports 2026-11-23",
)
def test_mesh_flush_order():
    """Ranks 1 and 2 have more pending in dp and reduce that first, ranks 0 and 3 begin with tp: a cycle of waits."""
    rank, _ = where()
    flusher = BucketFlusher(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    for step in range(5):
        flusher.push("dp", torch.randn(8))
        flusher.push("tp", torch.randn(8))
        if step == 3:
            flusher.push("dp" if rank in (1, 2) else "tp", torch.randn(8))
        flusher.flush()  # HERE


class Averages:
    def __init__(self):
        self.jobs = []

    def run(self):
        for tensor, group in self.jobs:
            dist.all_reduce(tensor, group=group)  # HERE


@planted("group_order_deadlock", [5], n=6, marked=True, family="swap", origin="unseen 2026-11-25")
def test_a_rank_registers_what_all_share_before_what_pairs_do(group):
    pairs = [dist.new_group([2 * k, 2 * k + 1]) for k in range(3)]
    averages = Averages()
    averages.jobs += [(torch.ones(3), pairs[group.rank // 2]) for _ in range(3)]
    averages.jobs.insert(0 if group.rank == 5 else 3, (torch.ones(20), dist.group.WORLD))
    averages.run()


@planted("extra_collective", [2], n=4, where="test_planted.py", family="extra", origin="held out 2026-11-22")
def test_the_group_is_forgotten_once(group: Group) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[group.rank // 2]
    dist.all_reduce(torch.ones(3), group=mine)
    if group.rank == 2:
        dist.all_reduce(torch.ones(3))
    else:
        dist.all_reduce(torch.ones(3), group=mine)
    dist.barrier()


@planted("p2p_unmatched", [2], n=4, marked=True, family="wrong_peer", origin="unseen 2026-11-25")
def test_a_chain_whose_links_are_of_two_groups(group):
    links = [dist.new_group(list(range(4))) for _ in range(2)]
    takes, gives = {0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (1, 1)}[group.rank]
    for part in range(3):
        x = torch.full((8,), float(part))
        if group.rank > 0:
            dist.recv(x, group.rank - 1, group=links[takes])  # HERE
        if group.rank < 3:
            dist.send(x, group.rank + 1, group=links[gives])  # HERE
    dist.barrier()
