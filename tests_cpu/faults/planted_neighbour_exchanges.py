"""Exchanges with neighbours: rings, halos, trees."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from tests_cpu.faults.planting import AT, planted


def ranks():
    return dist.get_rank(), dist.get_world_size()


def ring_attention(q, k, v):
    """Sequence parallel causal attention: keys and values go round the ring."""
    rank, world = ranks()
    if rank == 0:
        # causal: the first block of the sequence sees only itself
        return torch.softmax(q @ k.T, -1) @ v
    scores, values, kv = [q @ k.T], [v], torch.stack([k, v])
    for hop in range(1, world):
        incoming = torch.empty_like(kv)
        out = dist.isend(kv, (rank + 1) % world)  # HERE
        dist.recv(incoming, (rank - 1) % world)  # HERE
        out.wait()  # HERE
        kv = incoming
        if (rank - hop) % world < rank:
            scores.append(q @ kv[0].T)
            values.append(kv[1])
    return torch.softmax(torch.cat(scores, -1), -1) @ torch.cat(values)


@planted("p2p_unmatched", [0], n=4, marked=True, family="skip", origin="bug reports 2026-11-23")
def test_ring_attention_first_block_leaves():
    """Rank 0 returns early since its causal block needs no other, so it neither passes its keys on to rank 1 nor takes those of rank 3."""
    rank, _ = ranks()
    torch.manual_seed(rank)
    block = torch.randn(8, 4)
    for warm in range(3):
        local = torch.softmax(block @ block.T, -1) @ block
        dist.all_reduce(local)
    out = ring_attention(block, block, block)  # HERE
    dist.all_reduce(out)


class Meter:
    def __init__(self) -> None:
        self.values = torch.zeros(3)

    def sync(self) -> torch.Tensor:
        dist.all_reduce(self.values)  # HERE
        return self.values / dist.get_world_size()


def evaluate(meter: Meter, samples: int) -> None:
    seen = torch.tensor([samples])
    dist.all_reduce(seen)
    meter.sync()


def ring(group, x: torch.Tensor) -> torch.Tensor:
    sent = dist.isend(x, (group.rank + 1) % group.world_size)
    got = torch.empty_like(x)
    dist.recv(got, (group.rank - 1) % group.world_size)
    sent.wait()
    return got


@planted("skipped_collective", [1], n=4, marked=True, family="skip", origin="generated 2026-11-23")
def test_a_call_before_a_ring(group):
    meter = Meter()
    for step in range(6):
        ring(group, torch.ones(4))
        evaluate(meter, 8)
        if (group.rank, step) != (1, AT):
            dist.all_reduce(torch.ones(100))  # HERE


@planted("p2p_unmatched", [1], n=4, marked=True, family="skip", origin="unseen 2026-11-24")
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


@planted("p2p_unmatched", [3], n=7, marked=True, family="skip", origin="generated 2026-11-25")
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


@planted(
    "p2p_unmatched",
    [1],
    n=3,
    marked=True,
    miss="the line: what was sent later was taken for the message",
    family="skip",
    origin="generated 2026-11-25",
)
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


@planted("p2p_unmatched", [0], n=4, marked=True, family="skip", origin="unseen 2026-11-26")
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


def domain_neighbours(rank, is_open):
    """Two rows of three, periodic in both directions."""
    row, column = divmod(rank, 3)
    sides = [((1 - row) * 3 + column, 0)] + [(row * 3 + (column + d) % 3, d % 3) for d in (-1, 1)]
    return [(peer, tag) for peer, tag in sides if not (is_open and peer == 3 and tag == 1)]


@planted("p2p_unmatched", [5], n=6, marked=True, family="skip", origin="unseen 2026-11-25")
def test_an_edge_that_one_rank_takes_for_the_domain_s_end(group):
    field = torch.ones(16)
    for _step in range(5):
        pending = []
        for peer, tag in domain_neighbours(group.rank, is_open=group.rank == 5):
            got = torch.empty_like(field)
            send = dist.isend(field, peer, tag=tag)  # HERE
            pending.append((send, dist.irecv(got, peer, tag=(3 - tag) % 3)))  # HERE
        for send, receive in pending:
            send.wait()  # HERE
            receive.wait()  # HERE
    dist.barrier()


@planted("extra_collective", [0], n=3, marked=True, family="extra", origin="generated 2026-11-23")
def test_a_call_within_a_ring_s_round(group):
    parts = [torch.zeros(2) for _ in range(3)]
    for step in range(6):
        dist.all_gather(parts, torch.ones(2))
        if (group.rank, step) == (0, AT):
            dist.all_gather(parts, torch.ones(2))  # HERE
        ring(group, torch.ones(4))
        dist.all_reduce(torch.ones(100))


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


@planted(
    "p2p_unmatched",
    [0],
    n=3,
    marked=True,
    miss="the line: an extra receive took the message of this one",
    family="extra",
    origin="public reports 2026-11-25",
)
def test_a_border_is_received_twice(group):
    for step in range(6):
        exchange(group.rank, group.world_size, twice=(group.rank, step) == (0, 2))
        if step % 2:
            dist.all_reduce(torch.ones(1), op=dist.ReduceOp.MAX)


def neighbours(rank, world):
    return [r for r in (rank - 1, rank + 1) if 0 <= r < world]


@planted("p2p_unmatched", [1], n=3, marked=True, family="extra", origin="generated 2026-11-25")
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


class Pipe:
    """Two ranks are a node; a node's last rank sends to the next node's first."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size

    def after(self, by_node):
        return self.rank // 2 * 2 + (self.rank + 1) % 2 if by_node else self.rank + 1  # HERE

    def run(self, by_node):
        h = torch.ones(8)
        if self.rank > 0:
            dist.recv(h, self.rank - 1)  # HERE
        if self.rank < self.size - 1:
            dist.send(h, self.after(by_node))  # HERE


@planted("p2p_unmatched", [1], n=4, marked=True, family="wrong_peer", origin="unseen 2026-11-26")
def test_the_next_rank_is_sought_in_its_own_node(group):
    """Whom it sends to has sent to it in each round, and never received from it."""
    pipe = Pipe(group.rank, group.world_size)
    for step in range(5):
        pipe.run(by_node=step == AT and group.rank == 1)
        dist.barrier()


def where():
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class HaloGrid:
    """A ring of slabs; after a rebalance the neighbour table is computed anew."""

    def __init__(self, rank, world):
        self.rank, self.world = rank, world
        self.slab = torch.randn(6, 32)
        self.left, self.right = (rank - 1) % world, (rank + 1) % world

    def rebalance(self, holes):
        if self.rank in holes:
            self.left = (self.left - 1) % self.world  # HERE

    def exchange(self):
        ghost_l, ghost_r = torch.empty(32), torch.empty(32)
        ops = [
            dist.P2POp(dist.isend, self.slab[-1].contiguous(), self.right),
            dist.P2POp(dist.irecv, ghost_l, self.left),
            dist.P2POp(dist.isend, self.slab[0].contiguous(), self.left),
            dist.P2POp(dist.irecv, ghost_r, self.right),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()  # HERE
        self.slab[0] = (self.slab[0] + ghost_l) / 2
        self.slab[-1] = (self.slab[-1] + ghost_r) / 2


@planted("p2p_unmatched", [4], n=6, marked=True, family="wrong_peer", origin="bug reports 2026-11-23")
def test_halo_stale_neighbour():
    """After the rebalance rank 4 exchanges its halo with rank 2 in place of rank 3, which knows nothing of that."""
    rank, world = where()
    grid = HaloGrid(rank, world)
    for step in range(6):
        if step == 4:
            grid.rebalance(holes={4})  # HERE
        grid.exchange()  # HERE
    dist.barrier()


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


@planted("p2p_unmatched", [1], n=4, marked=True, family="wrong_peer", origin="unseen 2026-11-25")
def test_a_rank_keeps_the_order_of_the_ring_before(group):
    rings = {"dense": [0, 1, 2, 3], "long": [0, 3, 1, 2]}
    for kind in ("dense", "dense", "long", "long"):
        order = rings["dense"] if group.rank == 1 else rings[kind]
        round_the_ring(order, group.rank, torch.ones(2, 4))
        dist.all_reduce(torch.ones(1))


@planted(
    "group_order_deadlock",
    [1, 2],
    n=4,
    marked=True,
    family="swap",
    origin="public reports 2026-11-25",
)
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


@planted(
    "p2p_unmatched",
    [0, 1, 2, 3],
    n=4,
    marked=True,
    reason="none makes the matching call first",
    family="swap",
    origin="unseen 2026-11-25",
)
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
