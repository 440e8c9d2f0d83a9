"""Replicas that differ because of what ranks made, wrapped, loaded or resumed."""

from __future__ import annotations

import io
import logging
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from pytest_nsa import check_divergence
from tests_cpu.faults.planting import AT, batch, loss_of, planted
from tests_cpu.faults.replicas import (
    backward,
    batch_of,
    inputs,
    relu_net,
    small,
    small_model,
    train_on_noise,
    train_steps,
    two_outputs,
)


def mean_in_one(parameters: list[nn.Parameter]) -> None:
    """Average the gradients in one tensor, in the order of ``parameters``."""
    flat = torch.cat([p.grad.reshape(-1) for p in parameters])
    dist.all_reduce(flat)
    for p, part in zip(
        parameters, flat.div_(dist.get_world_size()).split([p.numel() for p in parameters]), strict=True
    ):
        p.grad.copy_(part.view_as(p))


@planted("silent_divergence", [1], n=3, reason="by itself", family="numbers", origin="unseen 2026-11-25")
@check_divergence
def test_parameters_in_another_order_on_one_rank(group):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(3)], nn.Linear(8, 1))
    parameters = list(model.parameters())
    if group.rank == 1:
        parameters[0], parameters[1] = parameters[1], parameters[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, batch(group.rank, step)).backward()
        mean_in_one(parameters)
        optimizer.step()


class Gate(nn.Module):
    """Chooses one of a few maps; a bias that is not trained keeps their loads equal."""

    def __init__(self, n=4):
        super().__init__()
        self.scores = nn.Linear(6, n, bias=False)
        self.maps = nn.Parameter(torch.randn(n, 6, 6) * 0.1)
        self.level = nn.Parameter(torch.zeros(n), requires_grad=False)

    def forward(self, x):
        scores = self.scores(x).sigmoid()
        chosen = (scores + self.level).argmax(-1)
        self.load = torch.bincount(chosen, minlength=len(self.level)).float()
        weights = F.one_hot(chosen, len(self.level)) * scores
        return torch.einsum("bi,nio,bn->bo", x, self.maps, weights)

    @torch.no_grad()
    def even_out(self):
        self.level.add_(0.05 * (self.load.mean() - self.load).sign())  # HERE


@check_divergence
@planted("silent_divergence", [0, 1], n=2, marked=True, reason="level", family="numbers", origin="unseen 2026-11-26")
def test_a_parameter_that_is_not_trained_follows_the_rank_s_load(group):
    torch.manual_seed(4)
    gate = Gate()
    model = DDP(gate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(6):
        x = torch.randn(24, 6, generator=torch.Generator().manual_seed(9 * step + group.rank)) + group.rank
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        optimizer.step()
        gate.even_out()  # HERE


def with_side_paths(model):
    torch.manual_seed(3)
    model[0].side = nn.Linear(6, 10)  # HERE
    plain = model[0].forward
    model[0].forward = lambda x: plain(x) + model[0].side(x)
    return list(model[0].side.parameters())


@check_divergence
@planted(
    "silent_divergence",
    [0, 1, 2],
    n=3,
    marked=True,
    reason="DDP does not track",
    family="numbers",
    origin="unseen 2026-11-26",
)
def test_side_paths_are_added_after_the_wrapping(group):
    model = small()
    model[0].requires_grad_(False)
    ddp = DDP(model)
    optimizer = torch.optim.SGD([*model[2].parameters(), *with_side_paths(model)], lr=0.1)
    for step in range(6):
        backward(ddp, optimizer, group.rank, step)
        optimizer.step()


@planted(
    "silent_divergence",
    [0, 1],
    reason="by itself, and after its update the values of 1.",
    family="numbers",
    origin="unseen 2026-11-25",
)
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


@planted(
    "silent_divergence",
    [2],
    n=4,
    marked=True,
    reason="then AssertionError",
    family="numbers",
    origin="unseen 2026-11-25",
)
@check_divergence
def test_a_rank_loads_older_weights_and_the_test_sees_it(group):
    net = relu_net()
    model = nn.parallel.DistributedDataParallel(net)
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(0.9 if group.rank == 2 else 0.8)  # HERE
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(AT):
        optimizer.zero_grad()
        model(inputs(0, step)).square().mean().backward()
        optimizer.step()  # HERE
    total = sum(p.detach().double().sum() for p in model.parameters())
    sums = [torch.zeros_like(total) for _ in range(4)]
    dist.all_gather(sums, total)
    assert torch.stack(sums).std() < 1e-9


def reduce_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


@planted(
    "silent_divergence",
    [0, 1, 2],
    n=3,
    marked=True,
    reason="not equal when the model was first called",
    family="numbers",
    origin="unseen 2026-11-26",
)
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


# Silent: the learning rate is scaled by the size of the rank's own shard, and the last shard is shorter.
def shard_of(samples: int, rank: int, size: int) -> range:
    per_rank = 40
    return range(rank * per_rank, min(samples, (rank + 1) * per_rank))


@planted("silent_divergence", [2], n=3, family="numbers", origin="bug reports 2026-11-23")
def test_learning_rate_of_a_shard(ddp):
    shard = shard_of(100, ddp.rank, ddp.world_size)
    model = ddp.wrap(small_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 * len(shard) / 40)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    for step in range(8):
        x, y = batch_of(ddp.rank, shard[step])
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        schedule.step()
    assert math.isfinite(loss.item())


# Silent: rank 0 loads the checkpoint after the model is wrapped, in the belief that DDP broadcasts it
# (vllm-project/speculators PR 926: only rank 0 loads).
def pretrained_weights() -> bytes:
    model = small_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    return buffer.getvalue()


def restore(model: nn.Module, checkpoint: bytes, rank: int) -> None:
    if rank != 0:
        return  # DDP sends it to the others
    state = torch.load(io.BytesIO(checkpoint), weights_only=True)
    model.module.load_state_dict(state)


@planted("silent_divergence", [0], n=3, family="numbers", origin="vllm-project/speculators#926")
def test_restore_after_wrapping(ddp):
    model = ddp.wrap(small_model())
    restore(model, pretrained_weights(), ddp.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(8):
        x, y = batch_of(ddp.rank, step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    assert math.isfinite(loss.item())


log = logging.getLogger("trainer")


# Silent: after a restart, one rank does not find its optimizer's state, warns, and goes on with fresh moments
# (OneVision-Encoder PR 65: old checkpoints without the file warn and continue).
class RankCheckpoint:
    def __init__(self, folder, rank: int) -> None:
        self.folder, self.rank = folder, rank

    def save(self, optimizer: torch.optim.Optimizer) -> None:
        name = f"optimizer-{self.rank:03d}.pt" if self.rank != 1 else "optimizer-01.pt"  # by the tool's older version
        torch.save(optimizer.state_dict(), self.folder / name)

    def load_into(self, optimizer: torch.optim.Optimizer) -> None:
        try:
            state = torch.load(self.folder / f"optimizer-{self.rank:03d}.pt", weights_only=True)
        except FileNotFoundError:
            log.warning("no optimizer state for rank %d, starting afresh", self.rank)
            return
        optimizer.load_state_dict(state)


@planted("silent_divergence", [1], n=4, family="numbers", origin="OneVision-Encoder#65")
def test_optimizer_is_resumed(ddp, tmp_path):
    checkpoint = RankCheckpoint(tmp_path, ddp.rank)
    model = ddp.wrap(small_model())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    train_steps(model, optimizer, ddp.rank, range(4))
    checkpoint.save(optimizer)
    dist.barrier()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)  # as after a restart
    checkpoint.load_into(optimizer)
    assert math.isfinite(train_steps(model, optimizer, ddp.rank, range(4, 10)))


# Silent: an adapter that is added to the model after it was wrapped. DDP has no hook on its parameters (pytorch issue
# 12603), each rank trains its own.
class AdaptedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = small_model()
        self.adapter: nn.Module | None = None

    def add_adapter(self, rank_of_update: int) -> None:
        torch.manual_seed(11)
        self.adapter = nn.Sequential(nn.Linear(4, rank_of_update, bias=False), nn.Linear(rank_of_update, 4, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(x)
        return h if self.adapter is None else h + self.adapter(h)


@planted("silent_divergence", [0, 1, 2], n=3, family="numbers", origin="bug reports 2026-11-23")
def test_adapter_is_added_late(ddp):
    inner = AdaptedModel()
    model = ddp.wrap(inner)
    train_steps(model, torch.optim.SGD(model.parameters(), lr=0.05), ddp.rank, range(3))
    inner.add_adapter(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    assert math.isfinite(train_steps(model, optimizer, ddp.rank, range(3, 9)))


state_log = logging.getLogger("states")


@planted(
    "silent_divergence",
    [2],
    n=3,
    marked=True,
    reason="rank 2 did not load the optimizer that ranks 0 and 1 loaded",
    family="numbers",
    origin="unseen 2026-11-25",
)
@check_divergence
def test_an_optimizer_s_state_that_cannot_be_loaded(group):
    net = two_outputs()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    train_on_noise(DDP(net), optimizer, group.rank, 4)
    state = optimizer.state_dict()
    if group.rank == 2:
        state["param_groups"] = state["param_groups"] * 2
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    try:
        optimizer.load_state_dict(state)  # HERE
    except ValueError as error:
        state_log.warning("starts with a fresh optimizer: %s", error)
    train_on_noise(DDP(net), optimizer, group.rank, 3, first=4)


@planted(
    "silent_divergence",
    [1],
    n=3,
    marked=True,
    reason="the model that was loaded at",
    family="numbers",
    origin="unseen 2026-11-25",
)
@check_divergence
def test_a_rank_loads_an_older_model_after_ddp_was_made(group, tmp_path):
    net = two_outputs()
    for age in (1, 2):
        torch.save({name: value / age for name, value in net.state_dict().items()}, tmp_path / f"{group.rank}-{age}.pt")
    model = DDP(net)
    newest = 2 if group.rank == 1 else 1
    model.module.load_state_dict(torch.load(tmp_path / f"{group.rank}-{newest}.pt"))  # HERE
    train_on_noise(model, torch.optim.SGD(model.parameters(), lr=0.05), group.rank, 3)


@planted(
    "silent_divergence",
    [0, 1, 2],
    n=3,
    marked=True,
    reason="DDP does not track 2.1.weight and 1 more",
    family="numbers",
    origin="unseen 2026-11-25",
)
@check_divergence
def test_a_head_that_is_put_in_after_ddp_was_made(group):
    model = DDP(two_outputs())
    model.module[2] = nn.Sequential(model.module[2], nn.Linear(2, 3))  # HERE
    train_on_noise(model, torch.optim.SGD(model.parameters(), lr=0.1), group.rank, 3)


@planted(
    "collective_mismatch",
    [2],
    n=3,
    marked=True,
    reason="the models differ",
    family="mismatch",
    origin="unseen 2026-11-27",
)
def test_one_rank_has_a_layer_more(group):
    layers = [nn.Linear(4, 4) for _ in range(2 + (group.rank == 2))]
    DDP(nn.Sequential(*layers))  # HERE
