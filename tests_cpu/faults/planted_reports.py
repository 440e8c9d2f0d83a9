"""Faults after public reports, and of generated schedules: what each rank decides by itself, and calls that come too soon.

HERE marks the lines that a verdict may name.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections import deque

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store as default_store
from torch.nn.parallel import DistributedDataParallel as DDP

from tests_cpu.faults.planting import planted


class Cache:
    """A cache with a host tier: what was written is agreed upon by all ranks of a tensor-parallel group."""

    def __init__(self):
        self.under_way = deque()

    def write(self, node, has_room):
        if has_room:
            self.under_way.append(node)

    def check_writes(self):
        if not self.under_way:
            return  # HERE
        done = torch.tensor(len(self.under_way))
        dist.all_reduce(done, op=dist.ReduceOp.MIN)  # HERE
        for _ in range(int(done)):
            self.under_way.popleft()

    def check_loads(self):
        dist.all_reduce(torch.zeros(1))


@planted("skipped_collective", [1], n=4, marked=True)
def test_nothing_to_check_is_not_agreed_upon(group):
    cache = Cache()
    for step in range(10):
        cache.write(f"node {step}", has_room=(group.rank, step) != (1, 6))
        cache.check_writes()
        if step % 3 == 2:
            cache.check_loads()


@planted("group_order_deadlock", [1, 2], n=4, marked=True, miss="two ranks of one kind")
def test_a_mesh_s_two_dimensions_in_another_order(group):
    shard = [dist.new_group([0, 1]), dist.new_group([2, 3])][group.rank // 2]
    replicate = [dist.new_group([0, 2]), dist.new_group([1, 3])][group.rank % 2]

    def exchange():
        dist.all_gather([torch.empty(4) for _ in range(2)], torch.ones(4), group=shard)  # HERE

    def average():
        dist.all_reduce(torch.ones(6), group=replicate)  # HERE

    for step in range(6):
        if step == 3 and group.rank in (1, 2):
            average()
            exchange()
        else:
            exchange()
            average()


class Batches(nn.Module):
    """Raises for a batch that is too large."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 2)

    def forward(self, x):
        if len(x) > 64:
            raise RuntimeError("out of memory")
        return self.out(x)


@planted("skipped_collective", [1], n=3, marked=True, reason="swallowed")
def test_a_batch_too_large_is_passed_over(group):
    model = DDP(Batches())
    for step in range(6):
        try:
            model(torch.randn(100 if (group.rank, step) == (1, 3) else 8, 4)).sum().backward()  # HERE
        except RuntimeError:
            continue  # HERE
        dist.all_reduce(torch.ones(3))


def meet(store, world, tag):
    """All ranks count at a key; none goes on before all have."""
    store.add(f"meet/{tag}", 1)
    while int(store.add(f"meet/{tag}", 0)) < world:  # HERE
        time.sleep(0.005)  # HERE


@planted("missing_collective", [2], n=4, marked=True)
def test_one_meets_by_another_tag(group):
    for step in range(6):
        meet(default_store(), group.world_size, step + (group.rank == 2 and step >= 4))


class Worker:
    """Hands gradients to a server by keys, and waits for the weights of its version."""

    def __init__(self, store, rank, version=0):
        self.store, self.rank, self.version = store, rank, version

    def step(self):
        self.store.set(f"gradient/{self.rank}/{self.version}", "1")  # HERE
        wait_for(self.store, f"weights/{self.version}")
        self.version += 1


def wait_for(store, key):
    while not store.check([key]):
        time.sleep(0.02)


@planted("missing_collective", [1], n=3, marked=True)
def test_a_worker_counts_one_version_too_many(group):
    store = default_store()
    if group.rank == 0:
        for version in range(8):
            for rank in (1, 2):
                wait_for(store, f"gradient/{rank}/{version}")
                store.delete_key(f"gradient/{rank}/{version}")
            store.set(f"weights/{version}", "1")
        return
    worker = Worker(store, group.rank)
    for step in range(8):
        if (group.rank, step) == (1, 4):
            worker = Worker(store, group.rank, step + 1)
        worker.step()


@planted("lock_deadlock", [2], n=3, marked=True, reason="holds itself")
def test_a_lock_on_a_file_is_taken_twice(group):
    path = os.path.join(tempfile.gettempdir(), f"build-{os.getppid()}.lock")

    def locked(function):
        file = os.open(path, os.O_CREAT | os.O_RDWR)
        fcntl.flock(file, fcntl.LOCK_EX)  # HERE
        function()
        os.close(file)

    def build():
        if group.rank == 2:
            locked(lambda: None)  # HERE

    dist.barrier()
    if group.rank != 2:
        time.sleep(0.5)
    locked(build)
    dist.barrier()


@planted("silent_divergence", [0, 1], reason="by itself, and after its update the values of 1.")
def test_replaced_layers_are_not_broadcast_by_their_owners(group):
    """Each rank updates its own parameters by hand, and shares some of them."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    batches = torch.Generator().manual_seed(group.rank)
    for _step in range(6):
        model.zero_grad()
        model(torch.randn(8, 4, generator=batches)).pow(2).mean().backward()
        for i, p in enumerate(model.parameters()):
            dist.all_reduce(p.grad)
            if i % 2 == group.rank:
                p.data -= 0.05 * p.grad
        for i, p in enumerate(model.parameters()):
            if i < 2:
                dist.broadcast(p.data, i % 2)


# Of generated schedules


def exchange(rank, n, *, twice=False):
    """A row of cells: each sends both ways, then receives."""
    works = [dist.isend(torch.ones(1), peer) for peer in (rank - 1, rank + 1) if 0 <= peer < n]
    if rank > 0:
        dist.recv(torch.empty(1), rank - 1)
    if rank < n - 1:
        dist.recv(torch.empty(1), rank + 1)
        if twice:
            dist.recv(torch.empty(1), rank + 1)  # HERE
    for work in works:
        work.wait()


@planted("p2p_unmatched", [0], n=3, marked=True, reason="from which no rank did before")
def test_a_border_is_received_twice(group):
    for step in range(6):
        exchange(group.rank, group.world_size, twice=(group.rank, step) == (0, 2))
        if step % 2:
            dist.all_reduce(torch.ones(1), op=dist.ReduceOp.MAX)


@planted("p2p_unmatched", [2], n=4, marked=True)
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


@planted("extra_collective", [1], n=3, marked=True)
def test_one_reduces_twice_while_all_wait_for_its_key(group):
    store = default_store()
    for step in range(6):
        store.set(f"{step}/of/{group.rank}", "1")
        for rank in range(group.world_size):
            store.get(f"{step}/of/{rank}")
        dist.all_reduce(torch.ones(1))
        if (group.rank, step) == (1, 2):
            dist.all_reduce(torch.ones(1))  # HERE


class EarlyStop:
    def __init__(self, skips):
        self.skips = skips

    def on_epoch(self, epoch):
        if epoch != self.skips:
            dist.all_reduce(torch.zeros(1), op=dist.ReduceOp.MAX)  # HERE


class Save:
    def on_epoch(self, epoch):
        dist.barrier()


@planted("skipped_collective", [0], marked=True, reason="ahead in the program")
def test_a_callback_leaves_its_vote_out(group):
    callbacks = [EarlyStop(1 if group.rank == 0 else None), Save()]
    step = 0
    for epoch in range(3):
        for _ in range(3):
            dist.all_reduce(torch.ones(4))
            if step % 2 == 0:
                dist.all_reduce(torch.ones(1))
            step += 1
        for callback in callbacks:
            callback.on_epoch(epoch)


class Reducer:
    def __init__(self):
        self.works = []

    def launch(self, parts):
        for part in parts:
            self.works.append(dist.all_reduce(part, async_op=True))  # HERE

    def finish(self):
        while self.works:
            self.works.pop(0).wait()


@planted("skipped_collective", [1], marked=True)
def test_a_round_of_handles_is_left_out(group):
    reducer = Reducer()
    for step in range(6):
        reducer.launch([] if (group.rank, step) == (1, 2) else [torch.ones(3), torch.ones(5)])
        reducer.finish()
        if step % 2:
            dist.broadcast(torch.ones(3), 0)


@planted("skipped_collective", [1], marked=True, reason="met the others in it")
def test_a_plan_is_not_shared_and_its_place_is_taken(group):
    for step in range(5):
        if (group.rank, step) != (1, 2):
            plan = [{"step": step} if group.rank == step % 2 else None]
            dist.broadcast_object_list(plan, src=step % 2)  # HERE
        mine = [None]
        dist.scatter_object_list(mine, [[r, step] for r in range(2)] if group.rank == 0 else None, src=0)
        dist.all_reduce(torch.ones(1))


@planted("skipped_collective", [0], marked=True, reason="call skipped")
def test_a_step_s_gradients_are_left_out_and_the_log_goes_on(group):
    step = 0
    for _epoch in range(3):
        for _batch in range(3):
            if (group.rank, step) != (0, 4):
                dist.all_reduce(torch.ones(4))  # HERE
            if step % 2 == 0:
                dist.all_reduce(torch.ones(1))
            step += 1
        dist.barrier()


@planted("p2p_unmatched", [1], n=3, marked=True)
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


# Of sets that were written without knowing the rules


@planted("p2p_unmatched", [0, 1, 2, 3], n=4, marked=True, reason="each rank of a ring sends to the next first")
def test_a_ring_in_which_large_blocks_are_sent_first_by_all(group):
    rank, n = group.rank, group.world_size
    for size in (16, 16, 1 << 20):
        block, got = torch.ones(size), torch.empty(size)
        if rank % 2 == 0 or size > 1024:
            dist.send(block, (rank + 1) % n)  # HERE
            dist.recv(got, (rank - 1) % n)
        else:
            dist.recv(got, (rank - 1) % n)
            dist.send(block, (rank + 1) % n)


def train_step(parts):
    for part in parts:
        part.grad = torch.ones_like(part)
        dist.all_reduce(part.grad)  # HERE


@planted("skipped_collective", [3], n=4, marked=True, reason="left the loop")
def test_a_stream_of_fewer_files_ends_sooner(group):
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _epoch in range(2):
        for _x in range(4 * len(range(11)[group.rank :: group.world_size])):  # HERE
            model(torch.randn(2, 8)).sum().backward()
            train_step(list(model.parameters()))
            optimizer.step()
            optimizer.zero_grad()
        dist.all_gather_object([None] * group.world_size, group.rank)


class Log:
    def on_step_end(self, step):
        if dist.get_rank() == 0 and step % 3 == 2:
            dist.all_reduce(torch.ones(1))  # HERE


@planted("extra_collective", [0], n=3, marked=True)
def test_a_logger_reduces_on_rank_zero_alone(group):
    callbacks = [Log()]
    for step in range(6):
        dist.all_reduce(torch.ones(129))
        loss = torch.ones(1)
        dist.all_reduce(loss)
        for callback in callbacks:
            callback.on_step_end(step)
