"""Programs in which a group is not made, or made otherwise."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests_cpu.faults.planting import planted


@planted(3)
def test_groups_that_their_members_alone_make_on_demand(group, faulty):
    """torch numbers groups as a rank makes them: to rank 2 the group with rank 0 is the first, to rank 0 the second."""
    made: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def of(*members: int) -> dist.ProcessGroup:
        if members not in made:
            made[members] = dist.new_group(list(members))  # HERE
        return made[members]

    if not faulty:  # all ranks make all groups, in one order
        of(0, 1), of(0, 2)
    if group.rank in (0, 1):
        dist.all_reduce(torch.ones(1), group=of(0, 1))  # HERE
    if group.rank in (0, 2):
        dist.all_reduce(torch.ones(1), group=of(0, 2))
    dist.barrier()


@planted(4)
def test_a_member_goes_on_to_its_messages(group, faulty):
    """The one that does not make the group waits for a message of one that does; so does a rank that is no member."""
    if group.rank in ((0, 3) if faulty else (0, 2, 3)):  # HERE
        dist.new_group([0, 2, 3], use_local_synchronization=True)  # HERE
    h = torch.ones(4)
    if group.rank > 0:
        dist.recv(h, group.rank - 1)
    if group.rank < 3:
        dist.send(h, group.rank + 1)


@planted(4, rank=3)
def test_a_layout_that_was_used_before(group, culprit):
    """One rank goes back to the layout of the first part, whose groups the others have made then, too."""
    for part, wide in enumerate((1, 2, 2)):
        if part == 2 and group.rank == culprit:
            wide = 1
        rows = [list(range(first, first + wide)) for first in range(0, 4, wide)]
        made = [dist.new_group(row) for row in rows]  # HERE
        dist.all_reduce(torch.ones(1), group=made[group.rank // wide])


@planted(4)
def test_each_half_makes_its_own_group(group, faulty):
    """Both groups have number 1, and share their keys in the store."""
    start = group.rank // 2 * 2
    half = dist.new_group([start, start + 1], use_local_synchronization=not faulty)  # HERE
    dist.all_reduce(torch.ones(3), group=half)
    dist.barrier()


@planted(4)
def test_each_rank_makes_its_own_row_and_column(group, faulty):
    """A mesh by hand: a rank makes the groups that it is in, and no others."""
    row, column = group.rank // 2, group.rank % 2
    rows = dist.new_group([2 * row, 2 * row + 1], use_local_synchronization=not faulty)  # HERE
    columns = dist.new_group([column, column + 2], use_local_synchronization=not faulty)
    for step in range(2):
        dist.all_reduce(torch.ones(2), group=rows)
        dist.all_reduce(torch.ones(2), group=columns)
    dist.barrier()
