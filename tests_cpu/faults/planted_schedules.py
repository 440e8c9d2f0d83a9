"""Schedules of messages, keys and collectives that one rank leaves in one round: after generated programs.

HERE marks the lines that a verdict may name.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from tests_cpu.faults.planting import AT, planted


def neighbours(rank, world):
    return [r for r in (rank - 1, rank + 1) if 0 <= r < world]


# What a rank left out is known by its own rounds.


@planted("p2p_unmatched", [2], n=3, marked=True)
def test_a_last_stage_keeps_a_gradient_and_goes_on_to_the_norm(group):
    rank, x = group.rank, torch.ones(4)
    for step in range(6):
        if rank:
            dist.recv(x, rank - 1)
        if rank < 2:
            dist.send(x, rank + 1)
            dist.recv(x, rank + 1)
        if rank and (rank, step) != (2, AT):
            dist.send(x, rank - 1)  # HERE
        dist.all_reduce(x.norm())


@planted("p2p_unmatched", [3], n=7, marked=True)
def test_a_leaf_of_the_tree_does_not_wait_for_the_answer(group):
    rank, x = group.rank, torch.ones(3)
    children = [c for c in (2 * rank + 1, 2 * rank + 2) if c < 7]
    for step in range(6):
        for child in children:
            dist.recv(x, child)
        if rank:
            dist.send(x, (rank - 1) // 2)
            if (rank, step) != (3, AT):
                dist.recv(x, (rank - 1) // 2)  # HERE
        for child in children:
            dist.send(x, child)


@planted("p2p_unmatched", [2], n=3, marked=True)
def test_a_worker_waits_for_a_job_that_it_did_not_ask_for(group):
    """The first rank takes requests from anybody."""
    if group.rank == 0:
        for _ in range(8):
            dist.send(torch.ones(1), dist.recv(torch.empty(1)))
    else:
        for job in range(4):
            if (group.rank, job) != (2, 2):
                dist.send(torch.ones(1), 0)  # HERE
            dist.recv(torch.empty(1), 0)
    dist.barrier()


@planted("p2p_unmatched", [1], n=3, marked=True)
def test_an_inner_node_takes_no_answer_and_passes_the_last_one_on(group):
    """It is found only when it has gone on: what it sends to its own child is taken for the answer."""
    rank, x = group.rank, torch.ones(3)
    for step in range(6):
        if rank < 2:
            dist.recv(x, rank + 1)
        if rank:
            dist.send(x, rank - 1)
            if (rank, step) != (1, AT):
                dist.recv(x, rank - 1)  # HERE
        if rank < 2:
            dist.send(x, rank + 1)


@planted("p2p_unmatched", [0], n=3, marked=True)
def test_a_first_stage_sends_nothing_after_the_first_reduction(group):
    rank, x = group.rank, torch.ones(4)
    warm = 2 - rank
    for step in range(3):
        begun = []
        for forward in [1] * warm + [1, 0] * (4 - warm) + [0] * warm:
            if forward and rank:
                dist.recv(x, rank - 1, tag=1)
            if forward and rank < 2 and (rank, step) != (0, 1):
                begun.append(dist.isend(x, rank + 1, tag=1))  # HERE
            if not forward and rank < 2:
                dist.recv(x, rank + 1, tag=2)  # HERE
            if not forward and rank:
                begun.append(dist.isend(x, rank - 1, tag=2))
        for work in begun:
            work.wait()
        dist.all_reduce(x)


@planted("p2p_unmatched", [3], n=4, marked=True)
def test_the_tag_of_another_round(group):
    """All others seek its rows under the tag that they have."""
    for step in range(5):
        others = [r for r in range(4) if r != group.rank]
        tag = step + 50 * ((group.rank, step) == (3, 1))
        sent = [dist.isend(torch.ones(2), other, tag=tag) for other in others]  # HERE
        for other in others:
            dist.recv(torch.empty(2), other, tag=step)
        for work in sent:
            work.wait()  # HERE
        dist.barrier()


# A collective left out, where the next thing to wait for is a message or a key.


@planted("skipped_collective", [2], n=3, marked=True)
def test_a_stage_that_leaves_the_reduction_out_waits_for_the_next_batch(group):
    rank, x = group.rank, torch.ones(4)
    for step in range(6):
        for _ in range(2 + step):
            if rank:
                dist.recv(x, rank - 1)
            if rank < 2:
                dist.send(x, rank + 1)
        if (rank, step) != (2, AT):
            dist.all_reduce(x)  # HERE


@planted("skipped_collective", [0], n=3, marked=True)
def test_a_reader_of_keys_leaves_the_reduction_out(group):
    store = dist.PrefixStore("meta", dist.distributed_c10d._get_default_store())
    store.set_timeout(timedelta(minutes=20))
    for step in range(6):
        store.set(f"{step}/of/{group.rank}", "1")
        for rank in range(3):
            store.get(f"{step}/of/{rank}")
        if (group.rank, step) != (0, AT):
            dist.all_reduce(torch.ones(1))  # HERE


@planted("skipped_collective", [0], n=3, marked=True)
def test_a_trainer_sends_fewer_tensors_than_its_engines_load(group):
    """In the first round, of which no earlier one tells: all others go on with the calls that they have made together so far."""
    for _ in range(3):
        for _ in range(3 if group.rank == 0 else 4):
            dist.broadcast(torch.ones(4), 0)  # HERE
        if group.rank == 0:
            for engine in (1, 2):
                dist.recv(torch.empty(2), engine)
        else:
            dist.send(torch.ones(2), 0)


@planted("skipped_collective", [2], n=6, marked=True)
def test_one_of_many_leaves_out_what_no_round_before_had(group):
    rows = [dist.new_group([r, r + 1]) for r in range(0, 6, 2)]
    for step in range(5):
        dist.all_reduce(torch.ones(4), group=rows[group.rank // 2])
        if step == 2 and group.rank != 2:
            dist.all_reduce(torch.ones(1))  # HERE


@planted("extra_collective", [0], n=4, marked=True)
def test_one_reduces_again_while_the_others_exchange(group):
    rank, x, got = group.rank, torch.ones(3), torch.empty(3)
    for step in range(6):
        sent = dist.isend(x, (rank + 1) % 4)
        dist.recv(got, (rank - 1) % 4)
        sent.wait()
        if step % 2 == 0:
            dist.all_reduce(torch.ones(1))
            if (rank, step) == (0, 2):
                dist.all_reduce(torch.ones(1))  # HERE


# Keys


@planted("missing_collective", [1], n=3, marked=True)
def test_a_rank_waits_for_its_own_key(group):
    """Each rank sets a key with its number, and reads all of them: the number tells which rank left its key out."""
    store = dist.PrefixStore("round", dist.distributed_c10d._get_default_store())
    store.set_timeout(timedelta(minutes=20))
    for step in range(6):
        if (group.rank, step) != (1, AT):
            store.set(f"{step}/of/{group.rank}", "1")  # HERE
        for rank in range(3):
            store.get(f"{step}/of/{rank}")


@planted("missing_collective", [1], n=2, marked=True)
def test_the_other_leads_for_the_first_time_and_sets_nothing(group):
    """Only the rank that waits has set such a key, when it led; there is no third one."""
    store = dist.PrefixStore("lead", dist.distributed_c10d._get_default_store())
    for step in range(5):
        if step % 2 != group.rank:
            store.wait([f"round/{step}"], timedelta(minutes=20))  # HERE
        elif step != 1:
            store.set(f"round/{step}", "1")  # HERE
        dist.all_reduce(torch.ones(1))


# A call more


@planted("p2p_unmatched", [1], n=3, marked=True)
def test_an_inner_cell_takes_a_border_twice(group):
    """Its neighbour has sent as often as it has received."""
    rank, here = group.rank, torch.ones(1)
    for step in range(6):
        sent = [dist.isend(here, other) for other in neighbours(rank, 3)]
        for other in neighbours(rank, 3):
            dist.recv(torch.empty(1), other)
            if (rank, step, other) == (1, 1, 0):
                dist.recv(torch.empty(1), other)  # HERE
        for work in sent:
            work.wait()
        if step % 2:
            dist.all_reduce(torch.ones(1))


@planted("extra_collective", [1], n=2, marked=True)
def test_a_reduction_more_among_those_begun_together(group):
    for step in range(6):
        begun = []
        for size in (3, 5):
            begun.append(dist.all_reduce(torch.ones(size), async_op=True))
            if (group.rank, step) == (1, AT):
                begun.append(dist.all_reduce(torch.ones(size), async_op=True))  # HERE
        for work in begun:
            work.wait()


class Stopping:
    def on_epoch(self, rank, epoch):
        dist.all_reduce(torch.zeros(1), op=dist.ReduceOp.MAX)
        if (rank, epoch) == (2, 0):
            dist.all_reduce(torch.zeros(1), op=dist.ReduceOp.MAX)  # HERE


class Saving:
    def on_epoch(self, rank, epoch):
        dist.barrier()


@planted("extra_collective", [2], n=3, marked=True)
def test_a_callback_asks_twice_in_the_first_epoch(group):
    for epoch in range(3):
        dist.all_reduce(torch.ones(4))
        for callback in (Stopping(), Saving()):
            callback.on_epoch(group.rank, epoch)


@planted("skipped_collective", [1], n=3, marked=True)
def test_a_reduction_of_the_same_size_takes_the_place_of_one_left_out(group):
    """Neither waits: the two reduce one number each. The latter is of the first epoch's end, which no round tells of."""
    for _ in range(3):
        for step in range(3):
            dist.all_reduce(torch.ones(4))
            if step % 2 == 0 and (group.rank, step) != (1, 2):
                dist.all_reduce(torch.ones(1))  # HERE
        dist.all_reduce(torch.ones(1), op=dist.ReduceOp.MAX)
        dist.barrier()


# Partners


@planted("p2p_unmatched", [2], n=3, marked=True)
def test_one_without_a_partner_takes_another_pair_s(group):
    peer = (group.rank ^ 1) % 3
    for _ in range(4):
        sent = dist.isend(torch.ones(4), peer)
        dist.recv(torch.empty(4), peer)  # HERE
        sent.wait()
        dist.all_reduce(torch.ones(1))


@planted("p2p_unmatched", [3], n=4, marked=True)
def test_a_rank_of_a_group_for_a_rank_of_all(group):
    """Two pipelines of two: the last of the second takes its own group's number for the first of the first."""
    pipes = [[0, 2], [1, 3]]
    mine = next(pipe for pipe in pipes if group.rank in pipe)
    for _ in range(3):
        if group.rank == mine[0]:
            dist.send(torch.ones(4), mine[1])
        else:
            dist.recv(torch.empty(4), mine.index(group.rank) - 1)  # HERE
    dist.all_reduce(torch.ones(1))
