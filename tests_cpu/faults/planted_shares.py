"""A rank that does not do its share as the others do: its neighbours, messages, keys, groups and gradients. After unseen sets.

HERE marks the lines that a verdict may name.
"""

from __future__ import annotations

import logging
import queue
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from pytest_nsa import check_divergence
from tests_cpu.faults.planting import AT, planted

log = logging.getLogger("shares")

# Messages


def round_the_ring(order, rank, block):
    at, n = order.index(rank), len(order)
    for _ in range(n - 1):
        arriving = torch.empty_like(block)
        halves = [
            dist.P2POp(dist.isend, block, order[(at + 1) % n]),
            dist.P2POp(dist.irecv, arriving, order[(at - 1) % n]),
        ]
        for handle in dist.batch_isend_irecv(halves):  # HERE
            handle.wait()  # HERE
        block = arriving


@planted("p2p_unmatched", [1], n=4, marked=True)
def test_a_rank_keeps_the_order_of_the_ring_before(group):
    rings = {"dense": [0, 1, 2, 3], "long": [0, 3, 1, 2]}
    for kind in ("dense", "dense", "long", "long"):
        order = rings["dense"] if group.rank == 1 else rings[kind]
        round_the_ring(order, group.rank, torch.ones(2, 4))
        dist.all_reduce(torch.ones(1))


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


@planted("p2p_unmatched", [1], n=4, marked=True)
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


def work(steps, batches):
    weight = torch.zeros(16)
    for _, batch in zip(range(steps), batches, strict=False):
        dist.send(weight + batch, dst=0)  # HERE
        dist.recv(weight, src=0)


@planted("p2p_unmatched", [3], n=5, marked=True, reason="sent it fewer")
def test_a_worker_has_a_batch_less_than_its_server_counts(group):
    if group.rank:
        work(6, range((48 if group.rank != 3 else 47) // 8))
    else:
        for _ in range(6 * 4):
            dist.send(torch.zeros(16), dst=dist.recv(torch.empty(16)))
    dist.barrier()


# Keys and groups


@planted("missing_collective", [2], n=4, marked=True, reason="ckpt/4/2")
def test_a_commit_waits_for_the_keys_of_all_and_one_shard_has_failed(group, tmp_path):
    store = dist.distributed_c10d._get_default_store()
    for step in range(7):
        dist.all_reduce(torch.ones(4))
        if step % 2 == 0:
            try:
                lost = "lost" if (group.rank, step) == (2, 4) else ""
                torch.save(step, tmp_path / lost / f"{group.rank}.{step}")
            except (OSError, RuntimeError):
                log.warning("shard of step %d is not saved", step)
            else:
                store.set(f"ckpt/{step}/{group.rank}", "saved")  # HERE
            if group.rank == 0:
                store.wait([f"ckpt/{step}/{r}" for r in range(4)])


@planted("init_timeout", [0, 2], n=4, where="in mesh")
def test_a_group_of_its_members_alone_before_a_mesh(group):
    """Its number stands for another group on the ranks that have not made it."""

    def mesh():
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    if group.rank in (0, 2):
        dist.new_group([0, 2])
    dist.all_reduce(torch.ones(1), group=mesh().get_group("tp"))


# Numbers


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))


def batch(rank, step):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * rank + step))


@planted("silent_divergence", [0, 1, 2], n=3, marked=True, reason="no_sync")
@check_divergence
def test_ddp_reduces_nothing_at_all(group):
    model = nn.parallel.DistributedDataParallel(small())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with model.no_sync():
        for step in range(AT):
            optimizer.zero_grad()
            model(batch(group.rank, step)).square().mean().backward()
            optimizer.step()  # HERE


@planted("silent_divergence", [2], n=4, marked=True, reason="then AssertionError")
@check_divergence
def test_a_rank_loads_older_weights_and_the_test_sees_it(group):
    net = small()
    model = nn.parallel.DistributedDataParallel(net)
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(0.9 if group.rank == 2 else 0.8)  # HERE
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(AT):
        optimizer.zero_grad()
        model(batch(0, step)).square().mean().backward()
        optimizer.step()  # HERE
    total = sum(p.detach().double().sum() for p in model.parameters())
    sums = [torch.zeros_like(total) for _ in range(4)]
    dist.all_gather(sums, total)
    assert torch.stack(sums).std() < 1e-9
