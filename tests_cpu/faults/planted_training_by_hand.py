"""Training without DDP: the program reduces gradients, and one rank does a step differently."""

from __future__ import annotations

import logging
import os

import torch
import torch.distributed as dist
from torch import nn

from tests_cpu.faults.planting import AT, planted


def average(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        dist.all_reduce(tensor)  # HERE


@planted(
    "extra_collective",
    [2],
    n=3,
    marked=True,
    reason="another round of the loop",
    family="extra",
    origin="generated 2026-11-23",
)
def test_an_attempt_more_in_a_step(group):
    """Its calls are those of a step more: the loops' counters alone tell that it is in the same one."""
    grads = [torch.ones(4), torch.ones(2)]
    for step in range(8):
        for attempt in range(3):
            average(grads)  # HERE
            if (group.rank, step, attempt) != (2, AT, 0):
                break
        dist.barrier()


class TooLong(Exception):
    pass


@planted(
    "extra_collective",
    [1],
    n=3,
    marked=True,
    reason="in an `except`",
    family="extra",
    origin="generated 2026-11-23",
    miss="a call in a handler of one rank",
)
def test_a_batch_again_in_halves(group):
    def forward(rows: int, most: int) -> None:
        dist.all_reduce(torch.ones(3))  # HERE
        if rows > most:
            raise TooLong
        dist.all_reduce(torch.ones(7))  # HERE

    for step in range(6):
        rows = 8 if (group.rank, step) == (1, AT) else 4
        try:
            forward(rows, 4)
        except TooLong:
            forward(rows // 2, 4)  # HERE


@planted("extra_collective", [1], n=3, marked=True, family="extra", origin="generated 2026-11-23")
def test_a_forward_more_is_like_the_next_one(group):
    """Its gathers are taken for those of the step, and the step's for those of the backward."""
    parts = [torch.empty(2) for _ in range(3)]

    def forward() -> None:
        for _ in range(2):
            dist.all_gather(parts, torch.ones(2))  # HERE

    def backward() -> None:
        for _ in range(2):
            dist.all_gather(parts, torch.ones(2))
            dist.all_reduce(torch.ones(6))

    for step in range(6):
        if step == 0 or (group.rank, step) == (1, AT):
            forward()  # HERE
        forward()
        backward()


@planted("skipped_collective", [0], n=3, marked=True, family="skip", origin="generated 2026-11-23")
def test_a_share_of_nothing(group):
    """What a class without samples skips is the last of a report; the rank is in the next epoch."""
    for epoch in range(5):
        counts = [0, 0]
        for step in range(3):
            average([torch.ones(4)])
            counts[step % 2] += (group.rank, epoch) != (0, AT) or step % 2 == 0
        for count in counts:
            try:
                dist.all_reduce(torch.tensor([1 / count, 0.0]), op=dist.ReduceOp.MAX)  # HERE
            except ZeroDivisionError:
                continue


def ranks():
    return dist.get_rank(), dist.get_world_size()


def attention_weights(length):
    return torch.empty(length, length).uniform_()  # HERE


@planted("skipped_collective", [2], n=3, marked=True, family="skip", origin="bug reports 2026-11-23")
def test_oom_batch_is_skipped():
    """Rank 2 runs out of memory with one very long sequence, catches it and goes to the next batch without the all-reduce of this step."""
    rank, _ = ranks()
    weight, skipped = nn.Parameter(torch.ones(4)), 0
    lengths = [64, 80, 96, 5_000_000 if rank == 2 else 90, 70, 60, 50]
    for length in lengths:
        try:
            loss = (attention_weights(length).mean() * weight).sum()  # HERE
        except RuntimeError as error:
            if "memory" not in str(error):
                raise
            skipped += 1
            weight.grad = None
            continue
        loss.backward()
        dist.all_reduce(weight.grad)  # HERE
        weight.data -= 0.01 * weight.grad
        weight.grad = None
    seen = [None] * dist.get_world_size()
    dist.all_gather_object(seen, skipped)


@planted(
    "skipped_collective", [0], marked=True, reason="call skipped", family="skip", origin="public reports 2026-11-25"
)
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


def train_step(parts):
    for part in parts:
        part.grad = torch.ones_like(part)
        dist.all_reduce(part.grad)  # HERE


@planted("skipped_collective", [3], n=4, marked=True, reason="left the loop", family="skip", origin="unseen 2026-11-25")
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


log = logging.getLogger("trainer")


# Ray: skew of counts. The skipped batch of fairseq and of pytorch issue 44353: an allocation fails on one rank, the
# handler goes on with the next batch, and that rank has reduced one gradient fewer than the others.
class Attention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.project = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor, claimed_length: int) -> torch.Tensor:
        h = self.project(x)
        scores = torch.empty(claimed_length, claimed_length)  # HERE
        return h.mean() + 0 * scores[0, 0].nan_to_num()


def average_in_place(model: nn.Module, size: int) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)  # HERE
        parameter.grad /= size


def guarded_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, int], size: int
) -> float | None:
    x, length = batch
    optimizer.zero_grad()
    try:
        loss = model(x, length)  # HERE
        loss.backward()
    except RuntimeError as error:  # HERE
        if "memory" not in str(error):
            raise
        log.warning("ran out of memory, skipping this batch of length %d", length)  # HERE
        return None  # HERE
    average_in_place(model, size)  # HERE
    optimizer.step()
    return loss.item()


@planted("skipped_collective", [1], n=3, marked=True, family="skip", origin="pytorch#44353")
def test_batch_that_does_not_fit(group):
    torch.manual_seed(0)
    model = Attention(16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for step in range(14):
        length = 1 << 26 if (group.rank, step) == (1, 8) else 64  # a sample whose header is corrupt
        loss = guarded_step(model, optimizer, (torch.randn(4, 16), length), group.world_size)
        if loss is not None:
            losses.append(loss)
    assert len(losses) > 10


def where():
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


@planted("skipped_collective", [3], n=4, marked=True, family="skip", origin="bug reports 2026-11-23")
def test_bad_sample_swallowed():
    """Rank 3 catches the exception of a bad sample and goes on with the next, without the all_reduce that the others do for that batch."""
    rank, world = where()
    weight = torch.zeros(5)
    skipped = 0
    for i in range(8):
        record = {"x": torch.randn(5), "y": None if rank == 3 and i == 4 else 1.0}
        try:
            error = record["x"] @ weight - record["y"]  # HERE
            grad = record["x"] * error
            dist.all_reduce(grad)  # HERE
            weight -= 0.01 * grad / world
        except TypeError as e:
            skipped += 1  # HERE
            print(f"rank {rank}: sample {i} left out: {e}")
    gathered = [None] * world
    dist.all_gather_object(gathered, skipped)  # HERE


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


@planted(
    "skipped_collective",
    [2],
    n=4,
    marked=True,
    family="skip",
    origin="unseen 2026-11-25",
    miss="models that differ from rank to rank",
)
def test_a_stage_that_has_no_experts_has_no_norm_of_them(group):
    """Its model is another one: that it did not enter a module which it has not is no branch."""
    model = Dense(0 if group.rank == 2 else 2)
    for _step in range(3):
        model(torch.ones(2, 6)).sum().backward()
        norm_of(model, False)
        norm_of(model, True)
        dist.all_reduce(torch.ones(2))


def average_gradients(model):
    flat = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    at = 0
    for p in model.parameters():
        p.grad.copy_(flat[at : at + p.numel()].view_as(p))
        at += p.numel()


class EMA:
    def __init__(self, model, every):
        self.shadow = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        self.every, self.updates = every, 0

    def update(self, model):
        self.updates += 1
        now = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        self.shadow.lerp_(now, 0.1)
        if self.updates % self.every == 0:
            dist.broadcast(self.shadow, src=0)  # HERE


@planted("skipped_collective", [2], n=3, marked=True, family="skip", origin="bug reports 2026-11-23")
def test_ema_counter_lags():
    """Rank 2 alone meets an infinite gradient in step 2 and skips that update, so its EMA counter is one behind and it does not join the EMA broadcast of step 4."""
    rank, _ = ranks()
    torch.manual_seed(0)
    model = nn.Linear(7, 3)
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    ema = EMA(model, every=5)
    for step in range(15):
        opt.zero_grad()
        scale = float("inf") if (rank, step) == (2, 2) else 1.0
        (model(torch.randn(4, 7)).mean() * scale).backward()
        found_inf = not all(torch.isfinite(p.grad).all() for p in model.parameters())
        for p in model.parameters():
            p.grad.nan_to_num_(0.0, 0.0, 0.0)
        average_gradients(model)
        if not found_inf:
            opt.step()
            ema.update(model)  # HERE


class Warmed(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.top = nn.Linear(6, 16), nn.Linear(16, 3)
        self.base.requires_grad_(False)

    def forward(self, x):
        return self.top(self.base(x).relu())


@planted("collective_mismatch", [2], n=3, marked=True, family="swap", origin="unseen 2026-11-26")
def test_one_rank_trains_its_base_sooner(group):
    """Parameter by parameter, each of a size of its own: one that no round had is no call of a later round."""
    torch.manual_seed(1)
    model = Warmed()
    for step in range(7):
        model.base.requires_grad_(step >= (AT if group.rank == 2 else 6))  # HERE
        model.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)  # HERE
