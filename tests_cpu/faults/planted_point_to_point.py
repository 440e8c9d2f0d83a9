"""Sends and receives between ranks that do not match."""

from __future__ import annotations

import logging
import queue
import socket
import threading

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from pytest_nsa.fixtures import Group
from tests_cpu.faults.planting import AT, planted


@planted("p2p_unmatched", [1], n=2, marked=True, family="skip", origin="generated 2026-11-23")
def test_a_number_that_was_not_raised(group):
    """Messages are numbered by step; one rank did not count one, and sends under a number that it has used."""
    number = 1
    for step in range(6):
        if group.rank:
            dist.send(torch.ones(2), 0, tag=number)  # HERE
        else:
            dist.recv(torch.ones(2), 1, tag=number)
        number += (group.rank, step) != (1, AT)


@planted("p2p_unmatched", [0], n=3, marked=True, family="skip", origin="generated 2026-11-23")
def test_rows_that_are_passed_over(group):
    """The head says that the rows are too old, and the learner takes them not; the actor that sends them is the one to look at."""
    weights = torch.zeros(3)
    for step in range(6):
        if group.rank == 0:
            for actor in (1, 2):
                head = torch.empty(1)
                dist.recv(head, actor)
                if head < 0:
                    continue
                dist.recv(torch.empty(4), actor)  # HERE
        else:
            dist.send(torch.tensor([-1.0 if (group.rank, step) == (2, AT) else 1.0]), 0)
            dist.send(torch.ones(4), 0)  # HERE
        dist.broadcast(weights, 0)


@planted("p2p_unmatched", [1], n=3, marked=True, family="skip", origin="unseen 2026-11-24")
def test_a_receive_begun_ahead_is_left(group):
    """The last round of a part is shorter; the receive begun for a further one takes what is sent in the next part."""
    for rounds in (4, 4, 3, 4, 4):
        if group.rank == 0:
            for _ in range(rounds):
                dist.send(torch.ones(3), 1)
        elif group.rank == 1:
            into = [torch.empty(3) for _ in range(4)]
            begun = [dist.irecv(value, 0) for value in into]  # HERE
            for work in begun[:rounds]:
                work.wait()  # HERE
        dist.barrier()


log = logging.getLogger("shares")


class CacheSender:
    """Sends blocks in a thread of its own; one that is no longer there is logged."""

    def __init__(self, peer):
        self.peer, self.blocks, self.wanted = peer, {}, queue.Queue()
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        while True:
            name = self.wanted.get()
            try:
                dist.send(self.blocks[name], dst=self.peer)  # HERE
            except KeyError:
                log.warning("no block %s", name)
            finally:
                self.wanted.task_done()


@planted("p2p_unmatched", [1], n=4, marked=True, family="skip", origin="unseen 2026-11-25")
def test_a_block_is_evicted_before_it_is_sent(group):
    """A round has a message more than those before, so that a barrier is what the receiver's calls so far expect."""
    peer = (group.rank + 2) % 4
    sender = CacheSender(peer) if group.rank < 2 else None
    for request in range(8):
        names = [(request, part) for part in range(2 if request == 5 else 1)]
        for name in names:
            if sender is not None:
                if group.rank == 1:
                    sender.blocks.clear()
                sender.blocks[name] = torch.ones(16)
        if sender is not None:
            for name in names:
                sender.wanted.put(name)
            sender.wanted.join()
        else:
            for _ in names:
                dist.recv(torch.empty(16), src=peer)
        if request % 4 == 3:
            dist.barrier()


@planted("io_stuck", [0, 1], n=3, marked=True, family="swap", origin="generated 2026-11-23")
def test_two_send_before_they_receive(group, tmp_path):
    """A message that fits into the sockets' buffers, and one that does not."""
    ends = socket.socketpair() if group.rank == 2 else None
    path = str(tmp_path / "s")
    if group.rank == 0:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen()
    dist.barrier()
    link = None
    if group.rank == 1:
        link = socket.socket(socket.AF_UNIX)
        link.connect(path)
    elif group.rank == 0:
        link = listener.accept()[0]
    for step in range(6):
        if link is not None:
            message = bytes(100 if step < AT else 1 << 24)
            link.sendall(message)  # HERE
            link.recv(len(message))
        dist.all_reduce(torch.ones(1))
    assert ends is None or ends[0].close() is None


@planted("p2p_unmatched", [0, 1], family="swap", origin="first corpus")
def test_both_receive(group: Group) -> None:
    dist.recv(torch.ones(2), 1 - group.rank)
    dist.send(torch.ones(2), 1 - group.rank)


@planted("p2p_unmatched", [1, 2], n=4, family="swap", origin="first corpus")
def test_two_of_four_receive_from_each_other(group: Group) -> None:
    if group.rank in (1, 2):
        dist.recv(torch.ones(2), 3 - group.rank)
    dist.barrier()


def exchange(block: torch.Tensor, around) -> torch.Tensor:
    """The number of a rank within its group is taken for its number among all."""
    me, size = dist.get_rank(around), dist.get_world_size(around)
    got = torch.empty_like(block)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, block, (me + 1) % size),  # HERE
            dist.P2POp(dist.irecv, got, (me - 1) % size),
        ]
    )
    for work in works:
        work.wait()  # HERE
    return got


@planted("p2p_unmatched", [2, 3], n=4, marked=True, family="wrong_peer", origin="generated 2026-11-23")
def test_numbers_within_a_group(group):
    around = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context")).get_group("context")
    for step in range(6):
        block = torch.randn(4, 8)
        if step >= AT:
            block = exchange(block, around)
        dist.all_reduce(block.norm())


@planted("p2p_unmatched", [2, 3], n=4, marked=True, family="wrong_peer", origin="unseen 2026-11-25")
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


@planted("p2p_unmatched", [2], n=3, marked=True, family="wrong_peer", origin="generated 2026-11-25")
def test_one_without_a_partner_takes_another_pair_s(group):
    peer = (group.rank ^ 1) % 3
    for _ in range(4):
        sent = dist.isend(torch.ones(4), peer)
        dist.recv(torch.empty(4), peer)  # HERE
        sent.wait()
        dist.all_reduce(torch.ones(1))


@planted("p2p_unmatched", [3], n=4, marked=True, family="wrong_peer", origin="generated 2026-11-25")
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


@planted("p2p_unmatched", [0], miss="a message in a first round", family="extra", origin="first corpus")
def test_receives_what_nobody_sends(group: Group) -> None:
    dist.barrier()
    if group.rank == 0:
        dist.recv(torch.ones(2), 1)


@planted("extra_collective", [0], n=4, marked=True, family="extra", origin="generated 2026-11-25")
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


@planted(
    "p2p_unmatched", [0], marked=True, reason="dropped its Work without a wait", family="dropped", origin="arguments"
)
def test_a_send_that_is_dropped(group):
    """gloo forgets the buffer with the Work: plain torch hangs here, too."""
    if group.rank == 0:
        dist.isend(torch.ones(4), 1)  # HERE
    dist.barrier()
    if group.rank == 1:
        dist.recv(torch.zeros(4), 0)
    dist.barrier()


@planted(
    "p2p_unmatched",
    [1],
    n=3,
    marked=True,
    reason="dropped its Work without a wait",
    family="dropped",
    origin="arguments",
)
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


@planted(
    "collective_mismatch",
    [0, 1],
    n=3,
    marked=True,
    reason="gave different arguments",
    family="mismatch",
    origin="arguments",
)
def test_a_message_into_a_buffer_of_another_type(group):
    """Without a round before, nothing shows which of the two is wrong: both are named."""
    if group.rank == 0:
        dist.send(torch.ones(4), 1)  # HERE
    elif group.rank == 1:
        dist.recv(torch.empty(4, dtype=torch.int32), 0)  # HERE
    dist.barrier()


@planted(
    "collective_mismatch", [1], marked=True, reason="gave different arguments", family="mismatch", origin="arguments"
)
def test_a_message_into_another_type_in_one_round(group):
    for step in range(5):
        if group.rank == 0:
            dist.send(torch.ones(4), 1)
        else:
            dist.recv(torch.empty(4, dtype=torch.int32 if step == AT else torch.float32), 0)  # HERE


@planted("p2p_unmatched", [3], n=4, marked=True, family="mismatch", origin="generated 2026-11-25")
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


@planted(
    "collective_mismatch", [2], n=4, marked=True, reason="gloo aborted", family="mismatch", origin="unseen 2026-11-27"
)
def test_a_worker_sends_a_row_more_with_its_last_part(group):
    for part in range(3):
        if group.rank > 0:
            rows = 6 + ((group.rank, part) == (2, 2))
            dist.send(torch.ones(rows, 8), 0)  # HERE
            continue
        for worker in (1, 2, 3):
            dist.recv(torch.empty(6, 8), worker)
    dist.barrier()


@planted("collective_mismatch", [1], marked=True, reason="gloo aborted", family="mismatch", origin="unseen 2026-11-27")
def test_positions_that_one_rank_does_not_shorten(group):
    """Both ranks receive as many bytes as the other's short numbers have."""
    positions = torch.arange(5)
    sent = dist.isend(positions if group.rank == 1 else positions.to(torch.int16), 1 - group.rank)  # HERE
    dist.recv(torch.empty(5, dtype=torch.int16), 1 - group.rank)
    sent.wait()


@planted(
    "p2p_unmatched",
    [0],
    marked=True,
    reason="dropped its Work without a wait",
    family="dropped",
    origin="mpi 2026-11-27",
)
def test_a_receive_is_dropped_before_a_barrier(group):
    """The message that is left on the connection keeps the barrier from completing, though both ranks are in it."""
    for step in range(5):
        if group.rank == 1:
            dist.send(torch.ones(64), 0)
        else:
            work = dist.irecv(torch.empty(64), 1)  # HERE
            if step != AT:
                work.wait()
            del work
        dist.barrier()


@planted(
    "p2p_unmatched", [2], n=3, marked=True, reason="dropped its Work without a wait", family="dropped",
    origin="mpi 2026-11-27",
)  # fmt: skip
def test_the_last_rows_are_not_waited_for_before_a_sum(group):
    rows = torch.ones(32)
    for step in range(4):
        if group.rank == 0:
            for other in (1, 2):
                dist.send(rows, other)
        else:
            got = [dist.irecv(torch.empty(32), 0)]  # HERE
            if (group.rank, step) == (2, 3):
                got.clear()
            for work in got:
                work.wait()
        dist.all_reduce(torch.ones(1))
