"""Calls and messages out of their turn, which the others' own calls, rounds and sizes tell. After unseen sets.

HERE marks the lines that a verdict may name.
"""

from __future__ import annotations

import logging
import queue
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store as default_store
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from tests_cpu.faults.planting import AT, planted

log = logging.getLogger("turns")

# Messages


@planted("p2p_unmatched", [2], n=4, marked=True)
def test_a_chain_whose_links_are_of_two_groups(group):
    links = [dist.new_group(list(range(4))) for _ in range(2)]
    takes, gives = {0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (1, 1)}[group.rank]
    for part in range(3):
        x = torch.full((8,), float(part))
        if group.rank > 0:
            dist.recv(x, group.rank - 1, group=links[takes])  # HERE
        if group.rank < 3:
            dist.send(x, group.rank + 1, group=links[gives])  # HERE
    dist.barrier()


def neighbours(rank, is_open):
    """Two rows of three, periodic in both directions."""
    row, column = divmod(rank, 3)
    sides = [((1 - row) * 3 + column, 0)] + [(row * 3 + (column + d) % 3, d % 3) for d in (-1, 1)]
    return [(peer, tag) for peer, tag in sides if not (is_open and peer == 3 and tag == 1)]


@planted("p2p_unmatched", [5], n=6, marked=True)
def test_an_edge_that_one_rank_takes_for_the_domain_s_end(group):
    field = torch.ones(16)
    for _step in range(5):
        pending = []
        for peer, tag in neighbours(group.rank, is_open=group.rank == 5):
            got = torch.empty_like(field)
            send = dist.isend(field, peer, tag=tag)  # HERE
            pending.append((send, dist.irecv(got, peer, tag=(3 - tag) % 3)))  # HERE
        for send, receive in pending:
            send.wait()  # HERE
            receive.wait()  # HERE
    dist.barrier()


@planted("p2p_unmatched", [2], n=4, marked=True)
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


class Stage:
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


@planted("lock_deadlock", [2], n=4, marked=True)
def test_credits_that_a_stage_does_not_give_back(group):
    """The stage behind it waits in a queue, too: for what its reader is to receive."""
    Stage(group.rank, 16).run(16)
    dist.barrier()


# Keys


class KeyBarrier:
    def __init__(self, rank, size):
        self.rank, self.size, self.rounds = rank, size, {}

    def wait(self, name):
        count = self.rounds[name] = self.rounds.get(name, 0) + 1
        default_store().set(f"{name}/{count}/{self.rank}", "here")  # HERE
        default_store().wait([f"{name}/{count}/{r}" for r in range(self.size)])  # HERE


@planted("missing_collective", [1], n=4, marked=True)
def test_a_barrier_by_keys_that_a_rank_left_out_before_the_last_one(group):
    """It waits for keys, too, such as no other rank has set."""
    barrier = KeyBarrier(group.rank, 4)
    for epoch in range(3):
        if (group.rank, epoch) != (1, 1):
            barrier.wait("validated")
    barrier.wait("done")


# Collectives


@planted("skipped_collective", [3], n=4, marked=True, miss="sizes of rounds")
def test_a_rank_leaves_a_size_out_of_a_list_of_sizes(group):
    """One line, and a size of its own in each round."""
    for rows in (8, 12, 5, 9, 16):
        mine = rows // 4 + (group.rank < rows % 4)
        if mine == 1 and group.rank == 3:
            continue
        whole = [torch.empty((rows + 3) // 4 * 6) for _ in range(4)]
        dist.all_gather(whole, torch.ones((rows + 3) // 4 * 6))  # HERE
    dist.barrier()


def sparse_reduce(state, bucket):
    tensor = bucket.buffer()
    if not tensor.any():
        done = torch.futures.Future()
        done.set_result(tensor)
        return done
    work = dist.all_reduce(tensor.div_(state), async_op=True)  # HERE
    return work.get_future().then(lambda future: future.value()[0])


@planted("skipped_collective", [3], n=5, marked=True)
def test_a_communication_hook_that_leaves_an_empty_bucket_out(group):
    model = DDP(nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1)))
    model.register_comm_hook(group.world_size, sparse_reduce)
    for step in range(6):
        weight = 0.0 if (group.rank, step) == (3, AT) else 1.0
        (model(torch.ones(4, 6)).sum() * weight).backward()
        model.zero_grad()
    dist.all_reduce(torch.zeros(3))


class Averages:
    def __init__(self):
        self.jobs = []

    def run(self):
        for tensor, group in self.jobs:
            dist.all_reduce(tensor, group=group)  # HERE


@planted("group_order_deadlock", [5], n=6, marked=True)
def test_a_rank_registers_what_all_share_before_what_pairs_do(group):
    pairs = [dist.new_group([2 * k, 2 * k + 1]) for k in range(3)]
    averages = Averages()
    averages.jobs += [(torch.ones(3), pairs[group.rank // 2]) for _ in range(3)]
    averages.jobs.insert(0 if group.rank == 5 else 3, (torch.ones(20), dist.group.WORLD))
    averages.run()


def with_attempts(work, attempts=3):
    for attempt in range(attempts):
        try:
            return work()
        except OSError:
            log.warning("attempt %d failed", attempt)
            time.sleep(0.1)
    raise RuntimeError("all attempts failed")


@planted("extra_collective", [1], n=4, marked=True, miss="a loop of attempts")
def test_what_is_tried_again_has_a_collective(group):
    failures = [2] if group.rank == 1 else []

    def load(epoch):
        dist.all_reduce(torch.zeros(1), op=dist.ReduceOp.MIN)  # HERE
        if epoch in failures:
            failures.remove(epoch)
            raise OSError("stale file handle")

    for epoch in range(5):
        with_attempts(lambda epoch=epoch: load(epoch))
        for _ in range(3):
            dist.all_reduce(torch.ones(32))


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def body(self, x):
        with torch.no_grad():
            dist.all_reduce(x.mean(0))  # HERE
        return torch.tanh(self.linear(x))

    def forward(self, x):
        if len(x) > 8:
            return checkpoint(self.body, x, use_reentrant=False)
        return self.body(x)


@planted("skipped_collective", [1], n=3, marked=True)
def test_a_short_batch_is_not_recomputed(group):
    model = nn.Sequential(Normed(), Normed(), nn.Linear(6, 1))
    for step in range(5):
        rows = 4 if (group.rank, step) == (1, AT) else 12
        model(torch.randn(rows, 6)).sum().backward()
        dist.all_reduce(torch.ones(40))


@planted("skipped_collective", [3], n=4, marked=True)
def test_a_server_does_not_take_a_tied_weight(group):
    """The one beside it has, and waits where it does."""
    serving, training = dist.new_group([0, 2, 3]), dist.new_group([0, 1])
    names = ["embed", "block", "norm", "head"]
    for _round in range(2):
        for name in names:
            if group.rank == 0 or (group.rank > 1 and (name, group.rank) != ("head", 3)):
                dist.broadcast(torch.ones(16), 0, group=serving)  # HERE
            if group.rank < 2:
                dist.barrier(group=training)
        dist.all_gather([torch.empty(4) for _ in range(4)], torch.ones(4))


@planted("skipped_collective", [2], n=4, marked=True)
def test_a_norm_that_a_rank_leaves_out_is_as_small_as_what_follows(group):
    """Calls of one size take each other's place until its test has ended, one call short."""
    for step in range(9):
        if (group.rank, step) != (2, 5):
            dist.all_reduce(torch.ones(1))  # HERE
        if step % 3 == 2:
            dist.all_reduce(torch.ones(1), op=dist.ReduceOp.MIN)


class Dense(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.dense = nn.Linear(6, 6)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(experts))

    def forward(self, x):
        for layer in (self.dense, *self.experts):
            x = layer(x)
        return x


def norm_of(model, is_expert):
    gradients = [p.grad for name, p in model.named_parameters() if name.startswith("experts") == is_expert]
    if gradients:
        dist.all_reduce(torch.stack([g.square().sum() for g in gradients]).sum())  # HERE


@planted("skipped_collective", [2], n=4, marked=True)
def test_a_stage_that_has_no_experts_has_no_norm_of_them(group):
    """Its model is another one: that it did not enter a module which it has not is no branch."""
    model = Dense(0 if group.rank == 2 else 2)
    for _step in range(3):
        model(torch.ones(2, 6)).sum().backward()
        norm_of(model, False)
        norm_of(model, True)
        dist.all_reduce(torch.ones(2))


# Loops


def parts_of(batch, size):
    first = 0
    while first < len(batch):  # HERE
        yield batch[first : first + size]
        first += size


@planted("infinite_loop", [3], n=4, marked=True, reason="goes round")
def test_a_for_over_parts_of_size_zero(group):
    """It calls a module in each round, and so makes progress for ever."""
    model = nn.Embedding(50, 8)
    for length in (16, 96 if group.rank == 3 else 24):
        total = torch.zeros(1)
        for part in parts_of(torch.zeros(4, length, dtype=torch.long), 64 // length):  # HERE
            total += model(part).sum().detach()  # HERE
        dist.all_reduce(total)
