"""Groups and meshes that some ranks do not make, or make in another order."""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from pytest_nsa.fixtures import Group
from tests_cpu.faults.planting import planted


@planted(
    "group_order_deadlock",
    [2],
    n=4,
    marked=True,
    reason="in another order",
    family="swap",
    origin="generated 2026-11-23",
)
def test_groups_by_the_order_of_a_set(group):
    members = {"pairs": [0, 1], "ends": [0, 3], "middle": [1, 2]}
    names = sorted(members) if group.rank == 2 else list(members)
    groups = {name: dist.new_group(members[name]) for name in names}  # HERE
    for name, own in groups.items():
        if group.rank in members[name]:
            dist.all_reduce(torch.ones(1), group=own)


@planted(
    "group_order_deadlock",
    [0, 1, 2],
    n=3,
    marked=True,
    reason="different orders",
    family="swap",
    origin="generated 2026-11-23",
)
def test_neighbours_make_groups_in_a_circle(group):
    for other in ((group.rank + 1) % 3, (group.rank - 1) % 3):
        pair = dist.new_group(sorted((group.rank, other)), use_local_synchronization=True)  # HERE
        dist.all_reduce(torch.ones(1), group=pair)


def ranks():
    return dist.get_rank(), dist.get_world_size()


class HostMetrics:
    """Averages the load of the hosts over a group of its own, with a short timeout so that it cannot disturb the training."""

    def __init__(self, settings):
        self.group = None
        if settings["host_metrics"]:
            self.group = dist.new_group(timeout=datetime.timedelta(minutes=20))  # HERE

    def step(self):
        if self.group is not None:
            load = torch.tensor([os.getloadavg()[0]])
            dist.all_reduce(load, group=self.group)


@planted("skipped_collective", [4], n=5, marked=True, family="group", origin="bug reports 2026-11-23")
def test_host_metrics_off_on_one_rank():
    """The settings of rank 4 come from an older file with host metrics off, so it does not call new_group, and the group of the others never forms."""
    rank, _ = ranks()
    settings = {"host_metrics": True, "lr": 0.1}
    if rank == 4:
        settings["host_metrics"] = False
    x = torch.ones(3)
    for _ in range(3):
        dist.all_reduce(x)
    metrics = HostMetrics(settings)  # HERE
    for _ in range(5):
        metrics.step()
        y = torch.rand(3)
        dist.all_reduce(y)


@planted("init_timeout", [2], n=3, marked=True, family="group", origin="unseen 2026-11-25")
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


def group_of(rank, members):
    if rank not in members:  # HERE
        return None
    return dist.new_group(members)  # HERE


@planted("init_timeout", [0, 1], n=4, marked=True, reason="group 1", family="group", origin="unseen 2026-11-26")
def test_two_groups_have_one_number(group):
    """What two ranks made alone is number 1 to them; to the others that is the group of all, which comes next."""
    first = group_of(group.rank, [0, 1])
    dist.all_reduce(torch.ones(2))
    if first is not None:
        dist.all_reduce(torch.ones(1), group=first)
    everyone = dist.new_group()
    dist.all_reduce(torch.ones(3), group=everyone)


@planted("init_timeout", [2], n=4, marked=True, reason="without group", family="group", origin="unseen 2026-11-26")
def test_a_member_goes_on_to_its_messages(group):
    """The one that does not make the group waits for a message of one that does; so does a rank that is no member."""
    if group.rank in (0, 3):  # HERE
        dist.new_group([0, 2, 3], use_local_synchronization=True)  # HERE
    h = torch.ones(4)
    if group.rank > 0:
        dist.recv(h, group.rank - 1)
    if group.rank < 3:
        dist.send(h, group.rank + 1)


# pytorch issues 25390 and 130102: new_group is for all ranks, members or not. A helper returns when it has the group of
# its own rank, so that the learner never makes the group of the actors; torch numbers every later group differently on it.
def group_of_role(rank: int, roles: dict[str, list[int]]):
    for role, ranks in roles.items():
        made = dist.new_group(ranks, group_desc=role)  # HERE
        if rank in ranks:  # HERE
            return made  # HERE
    raise ValueError(f"rank {rank} has no role")


@planted("init_timeout", [0], n=4, marked=True, family="group", origin="pytorch#25390")
def test_learner_and_actors(group):
    own = group_of_role(group.rank, {"learner": [0], "actors": [1, 2, 3]})  # HERE
    returns = torch.full((4,), float(group.rank))
    dist.all_reduce(returns, group=own)
    dist.barrier()
    everyone = dist.new_group(list(range(group.world_size)), group_desc="weights")  # HERE
    dist.broadcast(returns, src=0, group=everyone)
    assert returns[0] == 0


def mesh_of(size, width):
    sizes = [n for n in (size // width, width) if n > 1]
    return init_device_mesh("cpu", tuple(sizes), mesh_dim_names=("rows", "columns")[: len(sizes)])  # HERE


@planted(
    "init_timeout",
    [3],
    n=4,
    marked=True,
    reason="rank 3 did not create group",
    family="group",
    origin="unseen 2026-11-26",
)
def test_one_rank_makes_a_mesh_without_columns(group):
    mesh = mesh_of(group.world_size, 1 if group.rank == 3 else 2)
    for name in mesh.mesh_dim_names:
        dist.all_reduce(torch.ones(4), group=mesh.get_group(name))


@planted("init_timeout", [1], family="group", origin="first corpus")
def test_a_new_group_that_one_rank_does_not_make(group: Group) -> None:
    import select

    if group.rank == 1:
        select.select([], [], [], 1000)
    dist.new_group([0, 1])


def where():
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class ExpertRouter:
    """The ranks that host an expert have a group of their own, made by its members alone (local synchronization)."""

    def __init__(self, rank, table):
        self.rank, self.table, self.group = rank, table, None

    def build(self):
        hosts = self.table["hosts"]
        if self.table["mine"] is not None:  # HERE
            self.group = dist.new_group(hosts, use_local_synchronization=True)  # HERE
        return self

    def balance(self, load):
        if self.group is not None:
            dist.all_reduce(load, group=self.group)
        dist.all_reduce(load)  # HERE
        return load


@planted("init_timeout", [1], n=4, marked=True, family="group", origin="bug reports 2026-11-23")
def test_new_group_stale_table():
    """Rank 1's placement table says that it hosts no expert, so it does not make the group that its fellow hosts 0 and 3 are making."""
    rank, _ = where()
    placement = {0: "e0", 1: "e1", 3: "e2"}
    for _ in range(3):
        dist.all_reduce(torch.ones(4))
    table = {"hosts": sorted(placement), "mine": placement.get(rank)}
    if rank == 1:
        table["mine"] = None  # from before the rebalance
    router = ExpertRouter(rank, table).build()  # HERE
    for _ in range(3):
        router.balance(torch.rand(4))


@planted("init_timeout", [3], n=4, marked=True, reason="alone created", family="group", origin="unseen 2026-11-24")
def test_a_layout_that_was_used_before(group):
    """One rank goes back to the layout of the first part, whose groups the others have made then, too."""
    for part, wide in enumerate((1, 2, 2)):
        if part == 2 and group.rank == 3:
            wide = 1
        rows = [list(range(first, first + wide)) for first in range(0, 4, wide)]
        made = [dist.new_group(row) for row in rows]  # HERE
        dist.all_reduce(torch.ones(1), group=made[group.rank // wide])


@planted("init_timeout", [2], n=4, marked=True, family="group", origin="unseen 2026-11-24")
def test_a_pair_of_which_one_goes_by_another_name(group):
    """Members alone make these groups: one takes itself for a stranger, and has made a group of its own."""
    dist.all_reduce(torch.ones(1))
    hosts = {0: "a", 1: "b", 2: "a", 3: "b"}
    if group.rank == 2:
        hosts[2] = "a.local"
    mine = [rank for rank, host in hosts.items() if host == hosts[group.rank]]
    own = dist.new_group(mine, use_local_synchronization=True)  # HERE
    dist.all_reduce(torch.ones(1), group=own)  # HERE


@planted("init_timeout", [0, 2], n=4, where="in mesh", family="group", origin="unseen 2026-11-25")
def test_a_group_of_its_members_alone_before_a_mesh(group):
    """Its number stands for another group on the ranks that have not made it."""

    def mesh():
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    if group.rank in (0, 2):
        dist.new_group([0, 2])
    dist.all_reduce(torch.ones(1), group=mesh().get_group("tp"))


@planted("extra_collective", [0], n=3, marked=True, family="extra", origin="unseen 2026-11-28")
def test_an_extra_reduction_before_a_group_of_all(group):
    for _ in range(3):
        loss = torch.ones(3)
        dist.all_reduce(loss)
    if group.rank == 0:
        dist.all_reduce(loss)  # HERE
    everybody = dist.new_group()
    dist.all_reduce(torch.ones(1), group=everybody)
