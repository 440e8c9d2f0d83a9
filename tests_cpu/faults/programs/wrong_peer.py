"""Programs in which a message goes to, or is expected from, another rank."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests_cpu.faults.planting import planted


@planted(4)
def test_a_chain_whose_links_are_of_two_groups(group, faulty):
    links = [dist.new_group(list(range(4))) for _ in range(2)]
    takes, gives = {0: (0, 0), 1: (0, 1), 2: (1, 0 if faulty else 1), 3: (1, 1)}[group.rank]
    for part in range(3):
        x = torch.full((8,), float(part))
        if group.rank > 0:
            dist.recv(x, group.rank - 1, group=links[takes])  # HERE
        if group.rank < 3:
            dist.send(x, group.rank + 1, group=links[gives])  # HERE
    dist.barrier()


@planted(4)
def test_a_rank_of_a_group_for_a_rank_of_all(group, faulty):
    """Two pipelines of two: the last of the second takes its own group's number for the first of the first."""
    pipes = [[0, 2], [1, 3]]
    mine = next(pipe for pipe in pipes if group.rank in pipe)
    for _ in range(3):
        if group.rank == mine[0]:
            dist.send(torch.ones(4), mine[1])
        else:
            before = mine.index(group.rank) - 1
            dist.recv(torch.empty(4), before if faulty else mine[before])  # HERE
    dist.all_reduce(torch.ones(1))
