"""Silent errors of training, in the manner of TrainCheck's (OSDI 2025): replicas that part though DDP keeps them equal.

Written by hands that had not read the rules. A verdict must name a line that is marked with HERE.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math

import torch
import torch.distributed as dist
from torch import nn

log = logging.getLogger("trainer")


def small_model(width: int = 16) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 4))


def batch_of(rank: int, step: int, rows: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10_000 * (rank + 1) + step)
    return torch.randn(rows, 8, generator=generator), torch.randn(rows, 4, generator=generator)


from tests_cpu.faults.planting import planted

# 7
# Silent: gradients are clipped after their reduction, by a norm that only this rank knows, where its node's settings
# ask for that.

CLIPPING = {"node-a": "global", "node-b": "local"}


def node_of(rank: int) -> str:
    return "node-b" if rank == 1 else "node-a"


class Clipper:
    def __init__(self, mode: str, limit: float) -> None:
        self.mode, self.limit = mode, limit
        self.activation_norm = 1.0

    def watch(self, _module: nn.Module, _inputs: tuple, output: torch.Tensor) -> None:
        self.activation_norm = output.detach().norm().item()

    def __call__(self, parameters: list[nn.Parameter]) -> None:
        if self.mode == "global":
            nn.utils.clip_grad_norm_(parameters, self.limit)
            return
        scale = min(1.0, self.limit / self.activation_norm)
        for parameter in parameters:
            parameter.grad.mul_(scale)


@planted("silent_divergence", [1], n=3)
def test_clipping_by_node(ddp):
    model = ddp.wrap(small_model())
    clip = Clipper(CLIPPING[node_of(ddp.rank)], limit=0.2)
    model.register_forward_hook(clip.watch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        x, y = batch_of(ddp.rank, step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        clip(list(model.parameters()))
        optimizer.step()
    assert math.isfinite(loss.item())


# 8
# Silent: the learning rate is scaled by the size of the rank's own shard, and the last shard is shorter.


def shard_of(samples: int, rank: int, size: int) -> range:
    per_rank = 40
    return range(rank * per_rank, min(samples, (rank + 1) * per_rank))


@planted("silent_divergence", [2], n=3)
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


# 9
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


@planted("silent_divergence", [0], n=3)
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


# 10
# Silent: the loss is computed through the inner module, past DDP's forward, and nothing is averaged
# (swapping-autoencoder-pytorch issue 22).


class ContrastiveTrainer:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.normalize(self.model.module(x), dim=-1)

    def step(self, x: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        first, second = self.encode(x), self.encode(x + 0.01)
        logits = first @ second.T / 0.1
        loss = nn.functional.cross_entropy(logits, torch.arange(len(x)))
        loss.backward()
        self.optimizer.step()
        return loss.item()


@planted("silent_divergence", [0, 1], n=2)
def test_contrastive_pairs(ddp):
    trainer = ContrastiveTrainer(ddp.wrap(small_model()))
    for step in range(8):
        x, _ = batch_of(ddp.rank, step)
        assert math.isfinite(trainer.step(x))


# 11
# Silent: a spike of the loss makes a rank skip its optimizer's step, by its own loss and after the gradients have been
# averaged (WeatherGenerator PR 2718).


class SpikeGuard:
    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.average: float | None = None

    def is_spike(self, loss: float) -> bool:
        spike = self.average is not None and loss > self.factor * self.average
        if not spike:
            self.average = loss if self.average is None else 0.9 * self.average + 0.1 * loss
        return spike


@planted("silent_divergence", [2], n=4)
def test_spikes_are_skipped(ddp):
    model = ddp.wrap(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    guard = SpikeGuard(factor=6.0)
    for step in range(10):
        x, y = batch_of(ddp.rank, step)
        if (ddp.rank, step) == (2, 5):
            y = y * 20  # one wrong unit in its data
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        if guard.is_spike(loss.item()):
            log.warning("step %d: loss %g, skipped", step, loss.item())
            continue  # without a step
        optimizer.step()
    assert math.isfinite(loss.item())


# 12
# Silent: statistics of the rank's own batches, in a buffer that DDP is told not to broadcast, are folded into the
# parameters every few steps (as re-parametrisation of BatchNorm does).


class CentredLinear(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.register_buffer("centre", torch.zeros(inputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.centre.lerp_(x.detach().mean(0), 0.2)
        return self.linear(x - self.centre)

    @torch.no_grad()
    def fold(self) -> None:
        self.linear.bias.sub_(self.linear.weight @ self.centre)
        self.centre.zero_()


@planted("silent_divergence", [0, 1], n=2)
def test_statistics_are_folded(ddp):
    torch.manual_seed(3)
    centred = CentredLinear(8, 4)
    model = ddp.wrap(centred, broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(9):
        x, y = batch_of(ddp.rank, step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x + ddp.rank), y)
        loss.backward()
        optimizer.step()
        if step % 3 == 2:
            centred.fold()
    assert math.isfinite(loss.item())


# 13
# Silent: gradient accumulation that synchronises the first micro-batch and not the last (FunASR PR 3472).


@planted("silent_divergence", [0, 1], n=2)
def test_accumulation(ddp):
    accumulate = 3
    model = ddp.wrap(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for index in range(12):
        x, y = batch_of(ddp.rank, index)
        synchronise = index % accumulate == 0
        with contextlib.nullcontext() if synchronise else model.no_sync():
            loss = nn.functional.mse_loss(model(x), y) / accumulate
            loss.backward()
        if (index + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    assert math.isfinite(loss.item())


# 14
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


def train_steps(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> float:
    for step in steps:
        x, y = batch_of(rank, step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    return loss.item()


@planted("silent_divergence", [1], n=4)
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


# 15
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


@planted("silent_divergence", [0, 1, 2], n=3)
def test_adapter_is_added_late(ddp):
    inner = AdaptedModel()
    model = ddp.wrap(inner)
    train_steps(model, torch.optim.SGD(model.parameters(), lr=0.05), ddp.rank, range(3))
    inner.add_adapter(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    assert math.isfinite(train_steps(model, optimizer, ddp.rank, range(3, 9)))


# 16
# Silent: the last rank evaluates with averaged weights, leaves the context by an exception that its caller expects, and
# the weights are not put back (Open-Sora-Plan issue 186: restore is missing after validation).


class EnoughSamples(Exception):
    pass


class AveragedWeights:
    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.average = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self.average[name].lerp_(parameter, 1 - self.decay)

    @contextlib.contextmanager
    def applied_to(self, model: nn.Module):
        kept = {name: p.detach().clone() for name, p in model.named_parameters()}
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(self.average[name])
        yield model
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(kept[name])


@torch.no_grad()
def evaluate(model: nn.Module, wanted: int) -> float:
    total, seen = 0.0, 0
    for index in range(20):
        x, y = batch_of(99, index)
        total += nn.functional.mse_loss(model(x), y).item()
        seen += len(x)
        if seen >= wanted:
            raise EnoughSamples(total / (index + 1))
    return total / 20


@planted("silent_divergence", [3], n=4)
def test_evaluation_of_averaged_weights(ddp):
    model = ddp.wrap(small_model())
    averaged = AveragedWeights(model.module, decay=0.9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scores = []
    for epoch in range(3):
        train_steps(model, optimizer, ddp.rank, range(4 * epoch, 4 * epoch + 4))
        averaged.update(model.module)
        if ddp.rank == ddp.world_size - 1 and epoch == 1:  # it has the least to do
            try:
                with averaged.applied_to(model.module) as candidate:
                    scores.append(evaluate(candidate, wanted=60))
            except EnoughSamples as enough:
                scores.append(enough.args[0])
        dist.barrier()
    assert all(math.isfinite(score) for score in scores)
