"""What calls carry: element types, counts and reductions that differ, and messages of which the Work was dropped.

Faults of arguments end well: no backend compares them, and wrong numbers arrive. HERE marks the lines that a verdict may name.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests_cpu.faults.planting import AT, planted

# Works that are dropped


@planted("p2p_unmatched", [0], marked=True, reason="dropped its Work without a wait")
def test_a_send_that_is_dropped(group):
    """gloo forgets the buffer with the Work: plain torch hangs here, too."""
    if group.rank == 0:
        dist.isend(torch.ones(4), 1)  # HERE
    dist.barrier()
    if group.rank == 1:
        dist.recv(torch.zeros(4), 0)
    dist.barrier()


@planted("p2p_unmatched", [1], n=3, marked=True, reason="dropped its Work without a wait")
def test_a_batch_of_sends_that_is_dropped_in_one_step(group):
    here = torch.empty(4)
    for step in range(6):
        works = []
        if group.rank < 2:
            works = dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.ones(4), group.rank + 1)])  # HERE
        if group.rank == 1 and step == AT:
            works.clear()
        dist.barrier()
        if group.rank:
            dist.recv(here, group.rank - 1)
        for work in works:
            work.wait()


# Arguments that no backend compares


@planted("collective_mismatch", [2], n=4, marked=True, reason="numbers of different kinds")
def test_one_rank_gives_other_types_to_a_gather(group):
    x = torch.ones(4, dtype=torch.int32 if group.rank == 2 else torch.float32)
    dist.gather(x, [torch.empty(4) for _ in range(4)] if group.rank == 0 else None, dst=0)  # HERE


@planted("collective_mismatch", [1], n=3, marked=True, reason="numbers of different kinds")
def test_a_scatter_into_another_type(group):
    here = torch.empty(2, dtype=torch.int32 if group.rank == 1 else torch.float32)
    dist.scatter(here, [torch.ones(2) for _ in range(3)] if group.rank == 0 else None, src=0)  # HERE


@planted("collective_mismatch", [1], n=3, marked=True, reason="numbers of different kinds")
def test_a_scatter_into_a_longer_buffer(group):
    here = torch.empty(3 if group.rank == 1 else 2)
    dist.scatter(here, [torch.ones(2) for _ in range(3)] if group.rank == 0 else None, src=0)  # HERE


@planted("collective_mismatch", [1], marked=True, reason="numbers of different kinds")
def test_a_gather_of_fewer_in_one_round(group):
    """Of two ranks, the one that gave something else than in the rounds before."""
    for step in range(5):
        x = torch.ones(3 if group.rank == 1 and step == AT else 4)
        dist.gather(x, [torch.empty(4) for _ in range(2)] if group.rank == 0 else None, dst=0)  # HERE


@planted("collective_mismatch", [0], n=3, marked=True, reason="max")
def test_one_rank_takes_the_largest_in_a_reduce_scatter(group):
    out, op = torch.empty(2), dist.ReduceOp.MAX if group.rank == 0 else dist.ReduceOp.SUM
    dist.reduce_scatter_tensor(out, torch.ones(6), op=op)  # HERE


@planted("collective_mismatch", [2], n=3, marked=True, reason="numbers of different kinds")
def test_an_exchange_of_all_with_another_type(group):
    kind = torch.float64 if group.rank == 2 else torch.int64
    out = torch.empty(3, dtype=kind)
    dist.all_to_all_single(out, torch.ones(3, dtype=kind))  # HERE


@planted("collective_mismatch", [0, 1], n=3, marked=True, reason="numbers of different kinds")
def test_a_message_into_a_buffer_of_another_type(group):
    """Without a round before, nothing shows which of the two is wrong: both are named."""
    if group.rank == 0:
        dist.send(torch.ones(4), 1)  # HERE
    elif group.rank == 1:
        dist.recv(torch.empty(4, dtype=torch.int32), 0)  # HERE
    dist.barrier()


@planted("collective_mismatch", [1], marked=True, reason="numbers of different kinds")
def test_a_message_into_another_type_in_one_round(group):
    for step in range(5):
        if group.rank == 0:
            dist.send(torch.ones(4), 1)
        else:
            dist.recv(torch.empty(4, dtype=torch.int32 if step == AT else torch.float32), 0)  # HERE
