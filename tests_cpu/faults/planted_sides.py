"""What one side has and the other has not: a thread that comes later, a condition of one rank, a draw more, other counts.

After sets that were written without knowing the rules. HERE marks the lines that a verdict may name.
"""

from __future__ import annotations

import random
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import softplus
from torch.nn.parallel import DistributedDataParallel as DDP

from pytest_nsa import check_divergence
from tests_cpu.faults.planting import planted


def reduce_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def mean_of(value):
    total = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(total)  # HERE
    return total.item() / dist.get_world_size()


@planted("extra_collective", [3], n=4, marked=True, reason="selected by a condition")
def test_the_last_rank_prints_a_mean(group):
    """The others are in the loop over parameters that it has left, as ever, by the end of its step."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    for step in range(12):
        model(torch.randn(4, 6)).sum().backward()
        reduce_gradients(model)
        if step % 5 == 4 and group.rank == dist.get_world_size() - 1:
            print(f"step {step}: {mean_of(1.0)}")  # HERE


class Reporter(threading.Thread):
    """Sums a number over the ranks from time to time, in the group that training uses."""

    def __init__(self, every):
        super().__init__(daemon=True)
        self.every, self.ends = every, threading.Event()

    def run(self):
        while not self.ends.wait(self.every):
            dist.all_reduce(torch.ones(3))  # HERE


@planted("collective_mismatch", [2], n=4, marked=True)
def test_reports_from_a_thread_in_the_training_s_group(group):
    reporter = Reporter(0.3 + 0.3 * ((group.rank + 2) % 4))
    reporter.start()
    for _ in range(500):
        time.sleep(0.004)
        dist.all_reduce(torch.ones(3000))  # HERE
    reporter.ends.set()


@planted("collective_mismatch", [1], n=3, marked=True)
def test_sizes_are_gathered_in_a_thread_and_one_comes_later(group):
    def save():
        time.sleep(0.8 if group.rank == 1 else 0)
        dist.all_reduce(torch.zeros(3, dtype=torch.int64))  # HERE

    thread = threading.Thread(target=save, daemon=True)
    for step in range(10):
        time.sleep(0.2)
        dist.all_reduce(torch.ones(48))  # HERE
        if step == 3:
            thread.start()
    thread.join()


class Rows(nn.Module):
    """A layer whose rows are shared among ranks, on sequences that are shared as well or are not."""

    def __init__(self, in_parts):
        super().__init__()
        self.in_parts = in_parts

    def forward(self, x):
        if self.in_parts:
            parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, x)  # HERE
            x = torch.cat(parts)
        if self.in_parts:
            return x[: len(x) // dist.get_world_size()]
        dist.all_reduce(x)  # HERE
        return x


@planted("collective_mismatch", [2], n=4, marked=True)
def test_one_rank_s_layer_is_of_another_kind(group):
    layers = [Rows(True), Rows(True), Rows(group.rank != 2)]
    for _ in range(3):
        x = torch.randn(2, 8)
        for layer in layers:
            x = layer(x)


@planted("skipped_collective", [3], n=4, marked=True)
def test_the_first_call_of_a_group_of_two(group):
    """Neither member has called in it before: a group is made for calls."""
    ends = dist.new_group([0, 3])
    is_tied = group.rank == 0
    for _ in range(4):
        if is_tied:
            dist.all_reduce(torch.ones(20), group=ends)  # HERE
        dist.all_reduce(torch.ones(1))


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


@planted("p2p_unmatched", [3], n=4, marked=True)
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


@planted("p2p_unmatched", [2], n=4, marked=True)
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


@planted("p2p_unmatched", [0], n=4, marked=True)
def test_a_halo_whose_two_ends_are_not_both_closed(group):
    """All wait in a send to the next one; they have begun to receive as well, so that this is no ring of sends."""
    left, right = (group.rank - 1 if group.rank else None), (group.rank + 1) % 4
    for _ in range(5):
        under_way = []
        for peer in (left, right):
            if peer is not None:
                under_way += [dist.isend(torch.ones(1), peer), dist.irecv(torch.empty(1), peer)]  # HERE
        for work in under_way:
            work.wait()  # HERE
    dist.all_reduce(torch.ones(1))


@planted("skipped_collective", [0], n=3, marked=True)
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


class Pruned(Exception):
    """A trial is not worth the rest of its steps."""


@planted("skipped_collective", [3], n=4, marked=True)
def test_a_trial_that_one_rank_prunes(group):
    """The calls of its next trial pass for those of the others' trial, until that one has come to its end."""

    def trial(number):
        for step in range(5):
            for size in (16, 4, 8, 2):
                dist.all_reduce(torch.ones(size))  # HERE
            if (group.rank, number, step) == (3, 2, 2):
                raise Pruned  # HERE
        dist.all_reduce(torch.ones(1))  # HERE

    for number in range(5):
        try:
            trial(number)
        except Pruned:
            continue


@planted("skipped_collective", [3], n=4, marked=True)
def test_a_discriminator_that_pauses_where_it_is_good(group):
    """Gloo ends a rank over the other model's gradients; where the others were they wrote down as they raised."""
    one, two = DDP(nn.Linear(6, 10)), DDP(nn.Linear(10, 1))
    for step in range(8):
        loss = softplus(-two(torch.randn(4, 10))).mean()
        if (group.rank, step) != (3, 4):
            loss.backward()  # HERE
        one(torch.randn(4, 6)).sum().backward()


class Augment:
    """Mixes batches of all ranks by one stream of random numbers."""

    def __init__(self):
        self.random = random.Random(0)

    def sample(self):
        return self.random.random()  # HERE

    def __call__(self, x):
        if self.random.random() < 0.5:
            dist.all_gather([torch.empty_like(x) for _ in range(3)], x)  # HERE


@planted("extra_collective", [1], n=3, marked=True)
def test_one_draw_more_from_a_stream_that_all_share(group):
    """Its call comes after fewer of the others' than before, and in the same round of the loop."""
    augment = Augment()
    model = DDP(nn.Linear(6, 3))
    for step in range(12):
        augment(torch.randn(5, 6))
        model(torch.randn(5, 6)).sum().backward()
        if step == 3 and group.rank == 1:
            augment.sample()


def exchange(rows, gives, takes):
    got = torch.zeros(sum(takes), 2)
    dist.all_to_all_single(got, rows[: sum(gives)], takes, gives)  # HERE


@planted("collective_mismatch", [3], n=4, marked=True, reason="not what rank 3 has told")
def test_other_rows_than_were_told(group):
    """Two ranks do not agree on a number of rows: what they told each other decides who is wrong."""
    for step in range(5):
        gives = torch.tensor([1 + (group.rank + peer + step) % 3 for peer in range(4)])
        takes = torch.empty_like(gives)
        dist.all_to_all_single(takes, gives)
        if (group.rank, step) == (3, 3):
            gives[2] += 1  # HERE
        exchange(torch.ones(20, 2), gives.tolist(), takes.tolist())


@planted("silent_divergence", [1], n=3, marked=True, reason="the optimizer's lr differs")
@check_divergence
def test_a_rate_that_one_rank_cuts(group):
    torch.manual_seed(1)
    model = DDP(nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        if (group.rank, step) == (1, 4):
            for parameters in optimizer.param_groups:
                parameters["lr"] *= 0.1  # HERE
        optimizer.step()


@planted("silent_divergence", [0, 1], marked=True, reason="the optimizer's lr differs")
@check_divergence
def test_each_rank_draws_its_rate(group):
    torch.manual_seed(1)
    model = DDP(nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / (1 + group.rank))  # HERE
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()


@planted("silent_divergence", [0, 1, 2], n=3, marked=True, reason="not equal when the model was first called")
@check_divergence
def test_replicas_that_are_made_from_other_seeds(group):
    """Gradients are averaged by hand, and nothing makes the replicas equal before."""
    torch.manual_seed(42 + group.rank)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))  # HERE
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        reduce_gradients(model)
        optimizer.step()


@planted("extra_collective", [0], n=3, marked=True)
def test_an_evaluation_through_the_wrapper_on_one_rank(group):
    """What DDP broadcasts before a forward is counted apart from the others' call, over which gloo ends them."""
    model = DDP(nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8)))
    for _ in range(3):
        for _ in range(3):
            model(torch.randn(4, 5)).sum().backward()
        if group.rank == 0:
            with torch.no_grad():
                model(torch.randn(16, 5))  # HERE
        dist.broadcast(torch.zeros(4), 0)


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


@planted("skipped_collective", [3], n=4, marked=True)
def test_a_worker_that_leaves_its_part_out(group):
    """The driver is in the other branch of the test's ``if``: what the other workers do tells."""
    if group.rank:
        obey(group)
    else:
        for command in ("work", "work", "work", "work", "stop"):
            dist.broadcast_object_list([command], 0)
            if command == "work":
                dist.reduce(torch.ones(3), 0)  # HERE


@planted("skipped_collective", [5], n=6, marked=True)
def test_the_first_call_of_a_group_of_two_whose_like_has_ended(group):
    """The ranks that wait are in groups without those that ended their tests."""
    whole = [dist.new_group([0, 1, 2]), dist.new_group([3, 4, 5])][group.rank // 3]
    ends = [dist.new_group([0, 2]), dist.new_group([3, 5])][group.rank // 3]
    for step in range(3):
        if step and group.rank % 3 != 1 and group.rank != 5:
            dist.all_reduce(torch.ones(8), group=ends)  # HERE
        dist.all_reduce(torch.ones(1), group=whole)
