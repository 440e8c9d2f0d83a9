"""Groups and who is in them: made by members alone, one name for two, a call before another group's; a role that never trains.

After sets that were written without knowing the rules. HERE marks the lines that a verdict may name.
"""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from pytest_nsa import check_divergence
from tests_cpu.faults.planting import AT, planted


def group_of(rank, members):
    if rank not in members:  # HERE
        return None
    return dist.new_group(members)  # HERE


@planted("init_timeout", [0, 1], n=4, marked=True, reason="made group 1")
def test_two_groups_have_one_number(group):
    """What two ranks made alone is number 1 to them; to the others that is the group of all, which comes next."""
    first = group_of(group.rank, [0, 1])
    dist.all_reduce(torch.ones(2))
    if first is not None:
        dist.all_reduce(torch.ones(1), group=first)
    everyone = dist.new_group()
    dist.all_reduce(torch.ones(3), group=everyone)


@planted("init_timeout", [2], n=4, marked=True, reason="without group")
def test_a_member_goes_on_to_its_messages(group):
    """The one that does not make the group waits for a message of one that does; so does a rank that is no member."""
    if group.rank in (0, 3):  # HERE
        dist.new_group([0, 2, 3], use_local_synchronization=True)  # HERE
    h = torch.ones(4)
    if group.rank > 0:
        dist.recv(h, group.rank - 1)
    if group.rank < 3:
        dist.send(h, group.rank + 1)


@planted("group_order_deadlock", [0], n=4, marked=True, reason="smaller group")
def test_the_ends_share_a_weight_and_one_is_early(group):
    ends = dist.new_group([0, 3])
    for step in range(7):
        dist.all_reduce(torch.ones(8))
        is_early = group.rank == 0 and step >= AT  # HERE
        if is_early:
            dist.all_reduce(torch.ones(20), group=ends)  # HERE
        dist.all_reduce(torch.zeros(1), op=dist.ReduceOp.MAX)
        if group.rank in (0, 3) and not is_early:
            dist.all_reduce(torch.ones(20), group=ends)


class Tied(nn.Module):
    """The last layer has the first one's weight: a state has it twice, the parameters once."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x))


@planted("extra_collective", [0], n=4, marked=True)
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


def small():
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(6, 6, generator=generator), torch.randint(0, 3, (6,), generator=generator)


@planted("nan_loss", [1], n=2, marked=True)
def test_no_label_is_left_in_a_batch(group):
    model = DDP(small())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        x, y = batch(group.rank, step)
        counts = torch.zeros(6) if group.rank == 1 and step == AT else torch.ones(6)
        loss = (F.cross_entropy(model(x), y, reduction="none") * counts).sum() / counts.sum()  # HERE
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert torch.isfinite(loss)


class Adaptive:
    """Sets the rate by what a rank has seen itself, in one of two lines."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self, seen):
        for settings in self.optimizer.param_groups:
            if seen > 1.2:
                settings["lr"] = max(0.001, settings["lr"] / 2)  # HERE
            elif seen < 1.05:
                settings["lr"] = min(1.0, settings["lr"] * 2)  # HERE


@check_divergence
@planted("silent_divergence", [2], n=3, marked=True, reason="the optimizer's lr differs")
def test_a_rate_by_the_rank_s_own_loss(group):
    model = DDP(small())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    adaptive = Adaptive(optimizer)
    for step in range(6):
        x, y = batch(group.rank, step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        adaptive.step(1.5 if group.rank == 2 and step == AT else 1.1)


class Draws:
    """Draws until so many are of use."""

    def __init__(self, model, of_use):
        self.model, self.of_use = model, of_use

    @torch.no_grad()
    def value(self):
        value = float(self.model(torch.ones(1, 6)).norm())
        return value if self.of_use else -value

    def take(self, number):
        kept = []
        while len(kept) < number:  # HERE
            value = self.value()
            if value > 0:
                kept.append(value)
        return kept


@planted("infinite_loop", [2], n=3, marked=True)
def test_no_draw_is_of_use_on_one_rank(group):
    model = small()
    for step in range(5):
        taken = Draws(model, group.rank != 2 or step != AT).take(4)
        dist.all_reduce(torch.tensor(taken))


def save(state, rank):
    if rank == 0:  # HERE
        state.clear()
        dist.barrier()  # HERE


@planted("extra_collective", [0], n=2, marked=True, reason="selected by a condition")
def test_a_barrier_in_the_first_rank_s_branch(group):
    """The other one is in the next step's backward meanwhile."""
    model = DDP(small(), broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        x, y = batch(group.rank, step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if step == AT:
            save({}, group.rank)  # HERE


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


@planted("p2p_unmatched", [1], n=4, marked=True)
def test_the_next_rank_is_sought_in_its_own_node(group):
    """Whom it sends to has sent to it in each round, and never received from it."""
    pipe = Pipe(group.rank, group.world_size)
    for step in range(5):
        pipe.run(by_node=step == AT and group.rank == 1)
        dist.barrier()


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x):
        h = self.body(x)
        found = (h > -10).sum() if len(x) else torch.zeros(())
        dist.all_reduce(found)  # HERE
        return self.head(h).sum() / found.clamp(min=1)


@planted("collective_mismatch", [1], n=3, marked=True)
def test_a_count_of_nothing_is_a_float(group):
    """All are at one line of the forward: no rank takes another way through the modules."""
    torch.manual_seed(1)
    model = Parts()
    for step in range(6):
        model(torch.randn(0 if group.rank == 1 and step == AT else 5, 6)).backward()


@contextlib.contextmanager
def one_after_the_other(rank):
    if rank != 0:
        dist.barrier()  # HERE
    yield
    if rank == 0:
        dist.barrier()


@planted("skipped_collective", [0], n=3, marked=True)
def test_the_first_rank_s_turn_is_left_out(group):
    """It has the data already: its counterpart of the others' barrier does not come."""
    known = {"first": 1} if group.rank == 0 else {}
    dist.all_reduce(torch.ones(2))
    if "first" not in known:  # HERE
        with one_after_the_other(group.rank):  # HERE
            known["first"] = 2
    dist.all_reduce(torch.ones(3))
