"""Ranks with different parts: a scheduler and its workers, questions and answers."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

from tests_cpu.faults.planting import AT, planted


@planted("p2p_unmatched", [2], n=3, marked=True, family="skip", origin="unseen 2026-11-25")
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


class Pages:
    """Pages that all ranks fetch together, kept while there is room."""

    def __init__(self, room: int) -> None:
        self.room, self.kept = room, {}

    def get(self, name: int) -> torch.Tensor:
        if name not in self.kept:
            self.kept[name] = torch.full((4,), float(name))
            dist.all_reduce(self.kept[name])  # HERE
            while len(self.kept) > self.room:
                self.kept.pop(next(iter(self.kept)))
        return self.kept[name]


def answer(pages: Pages, name: int) -> torch.Tensor:
    page = pages.get(name)
    parts = [torch.empty(4) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, page)  # HERE
    return torch.stack(parts)


def schedule(pages: Pages, names: list[int]) -> None:
    for name in names:
        dist.broadcast(torch.tensor([name]), 0)
        answer(pages, name)
    dist.broadcast(torch.tensor([-1]), 0)


def serve(pages: Pages) -> None:
    named = torch.zeros(1, dtype=torch.long)
    while True:
        dist.broadcast(named, 0)
        if named.item() < 0:
            return
        answer(pages, int(named))


@planted("skipped_collective", [0], n=3, marked=True, family="skip", origin="unseen 2026-11-24")
def test_the_scheduler_keeps_more_pages(group):
    """The scheduler and the servers call one function from lines of their own; it still has a page that they have dropped."""
    if group.rank == 0:
        schedule(Pages(3), [1, 2, 1, 3, 1, 2])
    else:
        serve(Pages(2))


@planted("p2p_unmatched", [3], n=4, marked=True, family="skip", origin="unseen 2026-11-24")
def test_a_worker_has_had_enough(group):
    """It sends its result while the first rank still has work for it; the other workers wait for theirs."""
    for batch in range(2):
        if group.rank == 0:
            for item in range(15):
                dist.send(torch.tensor([item]), 1 + item % 3)  # HERE
            for worker in (1, 2, 3):
                dist.recv(torch.empty(1), worker)
        else:
            for done in range(5):
                dist.recv(torch.empty(1, dtype=torch.long), 0)  # HERE
                if (group.rank, batch, done) == (3, 1, 2):
                    break  # HERE
            dist.send(torch.ones(1), 0)  # HERE


@planted("p2p_unmatched", [0], n=3, family="skip", origin="review")
def test_a_server_that_takes_one_too_few(group):
    """The faster worker has sent more: it is no culprit."""
    row = torch.ones(65536)
    if group.rank == 0:
        for _ in range(4):
            dist.recv(row)
    else:
        for _ in range(3 if group.rank == 1 else 2):
            time.sleep(0.1 if group.rank == 1 else 0.4)
            dist.send(row, 0)
    dist.barrier()


@planted("skipped_collective", [0], n=3, marked=True, family="skip", origin="generated 2026-11-25")
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


def work(steps, batches):
    weight = torch.zeros(16)
    for _, batch in zip(range(steps), batches, strict=False):
        dist.send(weight + batch, dst=0)  # HERE
        dist.recv(weight, src=0)


def batch(rank, step):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * rank + step))


@planted(
    "p2p_unmatched",
    [3],
    n=5,
    marked=True,
    reason="made fewer matching calls",
    family="skip",
    origin="unseen 2026-11-25",
)
def test_a_worker_has_a_batch_less_than_its_server_counts(group):
    if group.rank:
        work(6, range((48 if group.rank != 3 else 47) // 8))
    else:
        for _ in range(6 * 4):
            dist.send(torch.zeros(16), dst=dist.recv(torch.empty(16)))
    dist.barrier()


@planted("p2p_unmatched", [2], n=4, marked=True, family="skip", origin="unseen 2026-11-26")
def test_an_actor_drops_one_of_its_messages(group):
    """What its learner receives from the next actor in the round before is past."""
    weights = [torch.ones(2), torch.ones(3)]
    for step in range(5):
        if group.rank == 0:
            for actor in range(1, 4):
                for _ in range(3):
                    dist.recv(torch.empty(7), actor)
        else:
            for i in range(3):
                if (group.rank, step, i) == (2, 1, 1):
                    continue  # HERE
                dist.send(torch.ones(7), 0)  # HERE
        for weight in weights:
            dist.broadcast(weight, 0)


@planted("skipped_collective", [0], n=3, marked=True, family="skip", origin="unseen 2026-11-26")
def test_a_request_that_is_refused_after_it_was_announced(group):
    """Announcements have a size of their own each: that they come again says no more than that."""

    def handle(request):
        box = [request]
        dist.broadcast_object_list(box, 0)
        if group.rank == 0 and len(box[0]) > 32:
            raise ValueError("too long")  # HERE
        dist.all_reduce(torch.ones(12 * len(box[0])))  # HERE

    for number in (3, 9, 17, 40, 5, 8):
        try:
            handle([*range(number)])
        except ValueError:
            continue


def obey(group):
    seen = 0
    while True:
        box = [None]
        dist.broadcast_object_list(box, 0)
        if box[0] == "stop":
            return
        if group.rank == 3 and seen >= 2:
            continue  # HERE
        seen += 1
        dist.reduce(torch.ones(3), 0)  # HERE


@planted("skipped_collective", [3], n=4, marked=True, family="skip", origin="unseen 2026-11-26")
def test_a_worker_that_leaves_its_part_out(group):
    """The driver is in the other branch of the test's ``if``: what the other workers do tells."""
    if group.rank:
        obey(group)
    else:
        for command in ("work", "work", "work", "work", "stop"):
            dist.broadcast_object_list([command], 0)
            if command == "work":
                dist.reduce(torch.ones(3), 0)  # HERE


def default_store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


@planted("p2p_unmatched", [0], n=4, marked=True, family="wrong_peer", origin="unseen 2026-11-25")
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


@planted("p2p_unmatched", [2], n=4, marked=True, family="wrong_peer", origin="public reports 2026-11-25")
def test_a_request_goes_to_another_worker(group):
    rank, n = group.rank, group.world_size
    if rank == 0:
        ask = torch.zeros(1)
        for _ in range(4 * (n - 1)):
            who = dist.recv(ask)
            dist.send(ask, who)
    else:
        for step in range(4):
            if (rank, step) == (2, 1):
                dist.send(torch.ones(1), 3)  # HERE
            else:
                dist.send(torch.ones(1), 0)
            dist.recv(torch.empty(1), 0)
    dist.barrier()


@planted("extra_collective", [2], n=3, marked=True, family="extra", origin="unseen 2026-11-24")
def test_the_servers_look_a_page_up_first(group):
    """One server drops what the others keep: it fetches it anew where they are about to gather."""
    if group.rank == 0:
        schedule(Pages(2), [1, 2, 1, 2, 1])
    else:
        serve(Pages(1 if group.rank == 2 else 2))


@planted(
    "p2p_unmatched",
    [2],
    n=4,
    marked=True,
    family="extra",
    origin="unseen 2026-11-24",
    miss="a message in a first round",
)
def test_a_reader_reports_though_nobody_asked(group):
    """Two of three readers report in each round, in turn; the first rank takes two in each. One reader has lost count."""
    turn = 0
    for step in range(9):
        dist.broadcast(torch.tensor([step]), 0)
        asked = [1 + (step + k) % 3 for k in range(2)]
        if group.rank == 0:
            for reader in asked:
                dist.recv(torch.empty(2), reader)
        else:
            mine = [1 + (turn + k) % 3 for k in range(2)]
            if group.rank in mine:
                dist.send(torch.ones(2), 0)  # HERE
            turn += 2 if (group.rank, step) == (2, 4) else 1
    dist.barrier()


@planted("p2p_unmatched", [2], n=3, marked=True, family="extra", origin="generated 2026-11-25")
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


@planted("io_stuck", [1], n=3, marked=True, family="io", origin="unseen 2026-11-24")
def test_two_signs_are_read_as_one(group):
    """An eventfd adds up what is written before it is read."""
    ready = os.eventfd(0)
    for step in range(6):
        for _ in range(2):
            os.eventfd_write(ready, 1)
            if (group.rank, step) != (1, AT):
                os.eventfd_read(ready)  # HERE
        if (group.rank, step) == (1, AT):
            for _ in range(2):
                os.eventfd_read(ready)  # HERE
        dist.all_reduce(torch.ones(1))
