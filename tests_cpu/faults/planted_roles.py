"""Ranks that play different parts: one schedules and the others serve, one asks and another answers, each at its own lines.

After programs whose authors had not read the rules. HERE marks the lines that a verdict may name.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.utils import store as stores

from tests_cpu.faults.planting import AT, planted


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


@planted("skipped_collective", [0], n=3, marked=True)
def test_the_scheduler_keeps_more_pages(group):
    """The scheduler and the servers call one function from lines of their own; it still has a page that they have dropped."""
    if group.rank == 0:
        schedule(Pages(3), [1, 2, 1, 3, 1, 2])
    else:
        serve(Pages(2))


@planted("extra_collective", [2], n=3, marked=True)
def test_the_servers_look_a_page_up_first(group):
    """One server drops what the others keep: it fetches it anew where they are about to gather."""
    if group.rank == 0:
        schedule(Pages(2), [1, 2, 1, 2, 1])
    else:
        serve(Pages(1 if group.rank == 2 else 2))


def clipped(model: nn.Module, data: torch.Tensor, limit: float) -> torch.Tensor:
    loss = model(data).pow(2).mean()
    if loss.item() > limit:
        dist.all_reduce(loss)  # HERE
    return loss.detach()


def mean_of(value: torch.Tensor) -> torch.Tensor:
    values = [torch.empty(()) for _ in range(dist.get_world_size())]
    dist.all_gather(values, value)  # HERE
    return torch.stack(values).mean()


@planted("extra_collective", [1], n=3, marked=True)
def test_what_is_given_to_a_call_comes_before_it(group):
    """Both calls are of one line: `mean_of(clipped(...))`."""
    torch.manual_seed(0)
    model, data = nn.Linear(4, 4), torch.ones(2, 4)
    for step in range(6):
        size = 1e3 if (group.rank, step) == (1, AT) else 100.0 if step == 1 else 1.0
        mean_of(clipped(model, data * size, 50.0))  # HERE


@planted("extra_collective", [2], n=3, marked=True)
def test_a_forward_more_sends_its_buffers(group, ddp):
    """DDP broadcasts the buffers of a batch norm in each forward in training mode: one more is a call more."""
    model = ddp.wrap(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(7):
        data = torch.randn(8, 4)
        loss = model(data).pow(2).mean()
        if (group.rank, step) == (2, AT):
            model(data.abs())  # HERE
        loss.backward()  # HERE
        optimizer.step()
        optimizer.zero_grad()


class Chapters:
    """Ranks meet at a store after each chapter; one that fails is counted as read."""

    def __init__(self, world_size: int) -> None:
        self.store, self.world_size, self.number = dist.distributed_c10d._get_default_store(), world_size, 0

    def read(self, fails: bool) -> None:
        if fails:
            self.number += 1
        stores.barrier(self.store, self.world_size, key_prefix=f"chapter/{self.number}", barrier_timeout=600)  # HERE
        self.number += 1


@planted("missing_collective", [1], n=4, marked=True, reason="chapter/4")
def test_a_chapter_is_counted_twice(group):
    chapters = Chapters(group.world_size)
    for chapter in range(6):
        chapters.read(fails=(group.rank, chapter) == (1, 3))  # HERE


@planted("p2p_unmatched", [1], n=3, marked=True)
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


@planted("p2p_unmatched", [2], n=4, marked=True)
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


@planted("p2p_unmatched", [3], n=4, marked=True)
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


@planted("p2p_unmatched", [2], n=3, marked=True)
def test_a_stage_takes_data_where_a_header_comes(group):
    """Each part begins with a header, under a tag of its own; one stage takes the part for a continued one."""
    continues = False
    for part in range(5):
        if group.rank > 0:
            if not continues:
                dist.recv(torch.empty(1), group.rank - 1, tag=1)  # HERE
            dist.recv(torch.empty(4), group.rank - 1, tag=2)  # HERE
        if group.rank < 2:
            dist.send(torch.ones(1), group.rank + 1, tag=1)  # HERE
            dist.send(torch.ones(4), group.rank + 1, tag=2)
        dist.barrier()
        continues = (group.rank, part) == (2, AT)


@planted("io_stuck", [1], n=3, marked=True)
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


@planted("init_timeout", [3], n=4, marked=True, reason="alone made group")
def test_a_layout_that_was_used_before(group):
    """One rank goes back to the layout of the first part, whose groups the others have made then, too."""
    for part, wide in enumerate((1, 2, 2)):
        if part == 2 and group.rank == 3:
            wide = 1
        rows = [list(range(first, first + wide)) for first in range(0, 4, wide)]
        made = [dist.new_group(row) for row in rows]  # HERE
        dist.all_reduce(torch.ones(1), group=made[group.rank // wide])


def likelihood(rows: torch.Tensor, *, last: bool) -> torch.Tensor:
    top = rows.clone()
    dist.all_reduce(top, op=dist.ReduceOp.MAX)
    total = (rows - top).exp()
    dist.all_reduce(total)
    if not last:
        return total
    picked = rows * 0.5
    dist.all_reduce(picked)  # HERE
    return total + picked


@planted("skipped_collective", [1], n=3, marked=True)
def test_the_last_of_three_like_calls_is_left_out(group):
    """Each takes the next one's place from then on, with other numbers; the others are left in the last."""
    for step in range(7):
        likelihood(torch.ones(6), last=(group.rank, step) != (1, AT))  # HERE


def is_steady(value: torch.Tensor, before: float) -> bool:
    highest = value.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)  # HERE
    return abs(float(value) - before) < 0.5


@planted("skipped_collective", [2], n=3, marked=True)
def test_all_stops_at_the_first_that_is_not(group):
    """What `all` goes through has a collective each; gloo aborts a rank over the sizes, so that its counters are not known."""
    values = [torch.ones(1) for _ in range(3)]
    for step in range(7):
        before = 5.0 if (group.rank, step) == (2, AT) else 1.0
        if all(is_steady(value, before) for value in values):  # HERE
            dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(12))


@planted("p2p_unmatched", [1], n=4, marked=True)
def test_a_child_of_the_tree_is_forgotten(group):
    """The tree's root changes: who is a leaf in one round has children in the next."""
    for step, root in enumerate((0, 0, 0, 1)):
        place = (group.rank - root) % 4
        children = [(child + root) % 4 for child in (2 * place + 1, 2 * place + 2) if child < 4]
        if (group.rank, step) == (1, 3):
            children.remove(3)  # HERE
        if place:
            dist.recv(torch.empty(2), (root + (place - 1) // 2) % 4)  # HERE
        for child in children:
            dist.send(torch.ones(2), child)  # HERE
        dist.all_reduce(torch.ones(1))


@planted("init_timeout", [2], n=4, marked=True)
def test_a_pair_of_which_one_goes_by_another_name(group):
    """Members alone make these groups: one takes itself for a stranger, and has made a group of its own."""
    dist.all_reduce(torch.ones(1))
    hosts = {0: "a", 1: "b", 2: "a", 3: "b"}
    if group.rank == 2:
        hosts[2] = "a.local"
    mine = [rank for rank, host in hosts.items() if host == hosts[group.rank]]
    own = dist.new_group(mine, use_local_synchronization=True)  # HERE
    dist.all_reduce(torch.ones(1), group=own)  # HERE
