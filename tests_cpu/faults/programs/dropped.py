"""Programs in which the Work of a message is not kept."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests_cpu.faults.planting import planted


@planted(2, rank=0)
def test_a_send_that_is_dropped(group, culprit):
    """gloo forgets the buffer with the Work: plain torch hangs here, too."""
    works = []
    if group.rank == 0:
        works.append(dist.isend(torch.ones(4), 1))  # HERE
        if group.rank == culprit:
            works.clear()
    dist.barrier()
    if group.rank == 1:
        dist.recv(torch.zeros(4), 0)
    dist.barrier()


@planted(3, rank=2)
def test_the_last_rows_are_not_waited_for_before_a_sum(group, culprit):
    rows = torch.ones(32)
    for step in range(4):
        if group.rank == 0:
            for other in (1, 2):
                dist.send(rows, other)
        else:
            got = [dist.irecv(torch.empty(32), 0)]  # HERE
            if (group.rank, step) == (culprit, 3):
                got.clear()
            for work in got:
                work.wait()
        dist.all_reduce(torch.ones(1))
