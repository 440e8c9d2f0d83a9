"""Pipeline stages that send, receive and reduce: one stage leaves its schedule."""

from __future__ import annotations

import os
import queue
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from pytest_nsa.fixtures import Group
from tests_cpu.faults.planting import AT, planted


@planted("p2p_unmatched", [3], n=4, marked=True, family="extra", origin="unseen 2026-11-25")
def test_the_last_stage_expects_a_batch_more(group):
    """10 rows in batches of 4: the last stage rounds up, the others down."""
    here = torch.empty(4)
    for _ in range(3 if group.rank == 3 else 2):
        if group.rank:
            dist.recv(here, src=group.rank - 1)  # HERE
        if group.rank < 3:
            dist.send(torch.ones(4), dst=group.rank + 1)
    dist.barrier()


class Tracker:
    """Reduces what four steps gave, over all ranks, where the last stage alone has something."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def add(self, value: float) -> None:
        self.values.append(value)
        if len(self.values) % 4 == 0:
            dist.all_reduce(torch.tensor([sum(self.values)]))  # HERE


@planted("extra_collective", [4, 5], n=6, miss="its like follows", family="extra", origin="generated 2026-11-23")
def test_the_last_stage_reduces_over_all(group):
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("stage", "data"))
    stage, data, tracker = mesh.get_local_rank("stage"), mesh.get_group("data"), Tracker()
    for _ in range(12):
        h = torch.randn(4, 8)
        if stage > 0:
            dist.recv(h, group.rank - 2)
        if stage < 2:
            dist.send(h, group.rank + 2)
        else:
            tracker.add(h.norm().item())  # HERE
        dist.all_reduce(h, group=data)
        dist.all_reduce(h.norm().reshape(1))


@planted("p2p_unmatched", [1], n=3, marked=True, family="extra", origin="unseen 2026-11-25")
def test_a_stage_that_cools_down_once_too_often(group):
    """Each stage sends what it has computed on, and waits for as many gradients; the one in the middle for one more."""
    here, batches = torch.empty(4), 3
    for _ in range(batches):
        if group.rank:
            dist.recv(here, src=group.rank - 1)
        if group.rank < 2:
            dist.send(torch.ones(4), dst=group.rank + 1)
    for _ in range(batches + (group.rank == 1)):
        if group.rank < 2:
            dist.recv(here, src=group.rank + 1)  # HERE
        if group.rank:
            dist.send(torch.ones(4), dst=group.rank - 1)
    dist.barrier()


@planted("p2p_unmatched", [3], n=4, marked=True, family="extra", origin="unseen 2026-11-25")
def test_the_last_stage_waits_for_a_batch_and_all_others_for_its_gradient(group):
    here = torch.empty(4)
    for _ in range(4 if group.rank == 3 else 3):
        if group.rank:
            dist.recv(here, src=group.rank - 1)  # HERE
        if group.rank < 3:
            dist.send(torch.ones(4), dst=group.rank + 1)
    for _ in range(3):
        if group.rank < 3:
            dist.recv(here, src=group.rank + 1)
        if group.rank:
            dist.send(torch.ones(4), dst=group.rank - 1)


class Tied(nn.Module):
    """The last layer has the first one's weight: a state has it twice, the parameters once."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x))


@planted("extra_collective", [0], n=4, marked=True, family="extra", origin="unseen 2026-11-26")
def test_weights_are_sent_once_more_than_they_are_taken(group):
    """The one that trains has made steps, and the others never do: that tells nothing about who is ahead."""
    torch.manual_seed(1)
    model, listeners = Tied(), dist.new_group([0, 1, 2])
    if group.rank == 0:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.arange(6)).square().mean().backward()
            optimizer.step()
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, 0, group=listeners)  # HERE
    elif group.rank < 3:
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0, group=listeners)  # HERE
    dist.all_reduce(torch.ones(3))


@planted("p2p_unmatched", [2], n=3, marked=True, family="mismatch", origin="unseen 2026-11-25")
def test_tags_by_the_number_of_chunks(group):
    """The last stage counts two chunks a batch. The first one waits as well, and for neither of the two."""
    chunks = 2 if group.rank == 2 else 1
    here = torch.ones(1 << 16)
    for number in range(4):
        if group.rank:
            dist.recv(here, src=group.rank - 1, tag=number * chunks)  # HERE
        if group.rank < 2:
            dist.send(here, dst=group.rank + 1, tag=number * chunks)  # HERE


@planted(
    "p2p_unmatched", [2], n=3, marked=True, miss="a tag in a first round", family="mismatch", origin="unseen 2026-11-24"
)
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


@planted("p2p_unmatched", [2], n=4, reason="to rank 0", family="wrong_peer", origin="held out 2026-11-22")
def test_a_stage_sends_to_the_wrong_peer(group: Group) -> None:
    rank = group.rank
    for micro in range(3):
        x = torch.full((4,), float(micro))
        if rank > 0:
            dist.recv(x, src=rank - 1)
        if rank < 3:
            dist.send(x + 1, dst=0 if (rank, micro) == (2, 1) else rank + 1)


class PartStage:
    """A pipeline's stage that computes nothing: as many forwards as there are parts, then as many backwards."""

    def __init__(self, rank, size):
        self.before, self.after = (r if 0 <= r < size else None for r in (rank - 1, rank + 1))

    def run(self, parts):
        h = torch.ones(12)
        for _ in range(parts):
            if self.before is not None:
                dist.recv(h, self.before)  # HERE
            if self.after is not None:
                dist.send(h, self.after)
        for _ in range(parts):
            if self.after is not None:
                dist.recv(h, self.after)  # HERE
            if self.before is not None:
                dist.send(h, self.before)


@planted("p2p_unmatched", [2], n=4, marked=True, family="skip", origin="unseen 2026-11-26")
def test_one_stage_has_not_come_to_more_parts(group):
    """Its neighbours have gone on otherwise than in the rounds before, and so has every rank but this one."""
    stage = PartStage(group.rank, group.world_size)
    for step in range(8):
        stage.run(4 if step >= (6 if group.rank == 2 else 4) else 2)


def where():
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class PipelineStage:
    def __init__(self, rank, world, drop_empty=False):
        self.rank, self.world, self.drop_empty = rank, world, drop_empty
        self.layer = nn.Linear(8, 8, bias=False)

    def micro(self, x):
        if self.rank > 0:
            x = torch.empty(4, 8)
            dist.recv(x, self.rank - 1)  # HERE
        y = torch.relu(self.layer(x)).detach()
        if self.drop_empty and not y.any():
            return  # HERE
        if self.rank + 1 < self.world:
            dist.send(y, self.rank + 1)  # HERE


@planted("p2p_unmatched", [2], n=4, marked=True, family="skip", origin="bug reports 2026-11-23")
def test_pp_drops_empty_micro():
    """Stage 2 drops a micro batch that is all padding and sends nothing on for it, so stage 3 waits for one more receive."""
    rank, world = where()
    stage = PipelineStage(rank, world, drop_empty=rank == 2)
    for step in range(3):
        for m in range(4):
            padded = step == 2 and m == 1
            stage.micro(torch.zeros(4, 8) if padded else torch.rand(4, 8) + 0.1)  # HERE
        dist.barrier()


@planted("p2p_unmatched", [1], n=3, marked=True, family="skip", origin="public reports 2026-11-25")
def test_the_middle_stage_returns(group):
    x = torch.ones(4)
    for step in range(6):
        if (group.rank, step) == (1, 3):
            return  # HERE
        if group.rank:
            dist.recv(x, group.rank - 1)  # HERE
        if group.rank < 2:
            dist.send(x, group.rank + 1)  # HERE
            dist.recv(x, group.rank + 1)  # HERE
        if group.rank:
            dist.send(x, group.rank - 1)  # HERE


@planted("p2p_unmatched", [2], n=3, marked=True, family="skip", origin="generated 2026-11-25")
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


@planted("p2p_unmatched", [0], n=3, marked=True, family="skip", origin="generated 2026-11-25")
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


# A collective left out, where the next thing to wait for is a message or a key.
@planted("skipped_collective", [2], n=3, marked=True, family="skip", origin="generated 2026-11-25")
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


class Stage:
    """A stage of a pipeline that makes all forwards of its micro-batches and then all backwards."""

    def __init__(self, rank, last):
        self.rank, self.last = rank, last

    def forward(self):
        x = torch.ones(8)
        if self.rank:
            dist.recv(x, self.rank - 1)  # HERE
        if self.rank < self.last:
            dist.send(x, self.rank + 1)  # HERE

    def backward(self):
        x = torch.ones(8)
        if self.rank < self.last:
            dist.recv(x, self.rank + 1)  # HERE
        if self.rank:
            dist.send(x, self.rank - 1)  # HERE


@planted("p2p_unmatched", [3], n=4, marked=True, family="skip", origin="unseen 2026-11-26")
def test_the_last_stage_counts_fewer_micro_batches(group):
    """All others make one more than in each step before: it is the one that does as ever."""
    stage = Stage(group.rank, 3)
    for rows in (16, 16, 18):
        number = rows // 4 if group.rank == 3 else -(-rows // 4)
        for _ in range(number):
            stage.forward()
        for _ in range(number):
            stage.backward()
    dist.barrier()


@planted("p2p_unmatched", [2], n=4, marked=True, family="skip", origin="unseen 2026-11-25")
def test_a_stage_sends_nothing_for_an_empty_part(group):
    """All others have ended by then."""
    for part in range(8):
        x = torch.ones(8)
        if group.rank > 0:
            dist.recv(x, group.rank - 1)
        if group.rank == 2 and part == AT:
            x.zero_()
        if group.rank < 3 and x.any():
            dist.send(x, group.rank + 1)  # HERE


# A pipeline of four stages; one of them drops a micro-batch in which nothing is left after its filter, and the stages
# behind it wait for the last one.
class FilterStage:
    def __init__(self, rank: int, size: int, threshold: float) -> None:
        self.rank, self.last, self.threshold = rank, rank == size - 1, threshold

    def receive(self) -> torch.Tensor:
        x = torch.empty(4, 8)
        dist.recv(x, src=self.rank - 1)  # HERE
        return x

    def run(self, micro_batches: list[torch.Tensor]) -> int:
        done = 0
        for micro_batch in micro_batches:
            x = micro_batch if self.rank == 0 else self.receive()  # HERE
            y = torch.where(x > self.threshold, x, 0)
            if not y.any():  # HERE
                continue  # HERE
            if not self.last:
                dist.send(y, dst=self.rank + 1)  # HERE
            done += 1
        return done


THRESHOLDS = [0.0, 0.5, 0.0, 0.0]


@planted("p2p_unmatched", [1], n=4, marked=True, family="skip", origin="bug reports 2026-11-23")
def test_pipeline_with_a_filter(group):
    micro_batches = [torch.full((4, 8), 0.01 if i == 5 else 1.0 + i) for i in range(8)]
    stage = FilterStage(group.rank, group.world_size, THRESHOLDS[group.rank])
    done = stage.run(micro_batches)  # HERE
    dist.barrier()
    assert done == 8


class CreditStage:
    """Its reader takes a credit per message; the main thread gives it back."""

    def __init__(self, rank, parts):
        self.rank, self.inbox, self.credits = rank, queue.Queue(), threading.Semaphore(2)
        threading.Thread(target=self.read, args=(parts,), daemon=True).start()

    def read(self, parts):
        for part in range(parts if self.rank > 0 else 0):
            self.credits.acquire()  # HERE
            x = torch.empty(4)
            dist.recv(x, self.rank - 1, tag=part)
            self.inbox.put(x)

    def run(self, parts):
        for part in range(parts):
            x = self.inbox.get() if self.rank > 0 else torch.full((4,), float(part))  # HERE
            if self.rank < 3:
                dist.send(x, self.rank + 1, tag=part)
            if self.rank == 2 and part % 3 == 0:
                continue
            self.credits.release()


@planted(
    "lock_deadlock",
    [2],
    n=4,
    marked=True,
    family="lock",
    origin="unseen 2026-11-25",
    miss="a thread that waits for another rank's answer",
)
def test_credits_that_a_stage_does_not_give_back(group):
    """The stage behind it waits in a queue, too: for what its reader is to receive."""
    CreditStage(group.rank, 16).run(16)
    dist.barrier()
