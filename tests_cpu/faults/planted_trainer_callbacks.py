"""A trainer with callbacks: epochs, evaluation, early stopping."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pytest_nsa.fixtures import DDP
from tests_cpu.faults.planting import AT, batch, case, loss_of, net, planted, planted_cases


class Callback:
    def on_step(self, trainer: Trainer) -> None: ...
    def on_eval(self, trainer: Trainer) -> None: ...
    def on_epoch(self, trainer: Trainer) -> None: ...


class Loss(Callback):
    def on_step(self, trainer: Trainer) -> None:
        dist.all_reduce(torch.ones(1))


class Stop(Callback):
    def on_eval(self, trainer: Trainer) -> None:
        dist.broadcast(torch.ones(1), 0)


class Save(Callback):
    def on_epoch(self, trainer: Trainer) -> None:
        dist.barrier()


class Trainer:
    """``odd`` names what this rank does otherwise in the epoch ``at``."""

    def __init__(self, ddp: Any, culprit: int, odd: str, callbacks: list[Callback], at: int = 1) -> None:
        self.rank, self.size, self.steps, self.epoch = ddp.rank, ddp.world_size, 0, 0
        self.model = ddp.wrap(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.odd, self.at, self.callbacks = odd if ddp.rank == culprit else "", at, callbacks

    def does(self, odd: str) -> bool:
        return (self.odd, self.at) == (odd, self.epoch)

    def call(self, name: str) -> None:
        for callback in self.callbacks:
            getattr(callback, name)(self)  # HERE

    def step(self, batch: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(batch).square().mean().backward()  # HERE
        self.optimizer.step()

    def train(self) -> None:
        for index in range(4 + self.does("a batch more")):
            self.steps += 1
            if self.does("drops a batch") and index == 1:
                continue
            try:
                if self.does("raises"):
                    raise ValueError("a bad batch")
                self.step(torch.randn(4, 8))
            except ValueError:
                pass
            self.call("on_step")

    def evaluate(self) -> None:
        if self.does("does not evaluate"):
            return
        for _ in range(2 + self.does("a batch more to evaluate")):
            with torch.no_grad():
                score = self.model.module(torch.randn(2, 8)).mean().reshape(1)
            dist.all_reduce(score)  # HERE
        self.call("on_eval")
        if self.does("a table"):
            dist.all_gather([torch.empty(2) for _ in range(self.size)], torch.ones(2))  # HERE

    def fit(self) -> None:
        for self.epoch in range(4):
            self.train()
            self.evaluate()
            if self.does("evaluates again"):
                self.evaluate()  # HERE
            self.call("on_epoch")


@planted_cases(
    "extra_collective",
    cases={
        "2_of_4": case(2, n=4, callbacks=[Loss, Stop, Save]),
        "1_of_2": case(1, callbacks=[Stop, Save]),
    },
    marked=True,
    miss="a count of the rounds",
    family="extra",
    origin="generated 2026-11-23",
)
def test_a_batch_more(ddp, culprit, callbacks):
    Trainer(ddp, culprit, "a batch more", [callback() for callback in callbacks]).fit()


@planted("extra_collective", [2], n=3, marked=True, family="extra", origin="generated 2026-11-23")
def test_a_batch_more_to_evaluate(ddp):
    Trainer(ddp, 2, "a batch more to evaluate", [Save(), Loss()]).fit()


class Norm(Callback):
    def on_step(self, trainer: Trainer) -> None:
        if trainer.steps % 2 == 0:
            dist.all_reduce(torch.ones(2), op=dist.ReduceOp.MAX)  # HERE


class Pair(Callback):
    """Reduces over one half of the ranks."""

    def __init__(self, size: int) -> None:
        self.groups = [dist.new_group(list(range(size // 2))), dist.new_group(list(range(size // 2, size)))]

    def on_step(self, trainer: Trainer) -> None:
        dist.all_reduce(torch.ones(3), group=self.groups[trainer.rank >= trainer.size // 2])


@planted("extra_collective", [1], n=5, marked=True, family="extra", origin="generated 2026-11-23")
def test_evaluates_again(ddp):
    Trainer(ddp, 1, "evaluates again", [Norm(), Pair(5)], at=2).fit()


@planted(
    "extra_collective",
    [0],
    n=2,
    marked=True,
    family="extra",
    origin="generated 2026-11-23",
    miss="two ranks of one kind",
)
def test_a_table_of_one_rank(ddp):
    Trainer(ddp, 0, "a table", [Loss(), Norm()], at=2).fit()


class LoopTrainer:
    """With its loop in one function, its step in another, and callbacks in a third."""

    def __init__(self, model: nn.Module, rank: int, after: Callable[[int], None] = lambda step: None) -> None:
        self.model, self.rank, self.after = model, rank, after

    def fit(self, steps: int) -> None:
        for step in range(steps):
            self.step(step)
            self.after(step)

    def step(self, step: int) -> None:
        loss_of(self.model, batch(self.rank, step)).backward()


@planted("extra_collective", [0], family="extra", origin="held out 2026-11-22")
def test_a_callback_of_the_first_rank_has_a_barrier(ddp: DDP) -> None:
    def save(step: int) -> None:
        if step == AT and ddp.rank == 0:
            dist.barrier()

    LoopTrainer(ddp.wrap(net()), ddp.rank, save).fit(6)


@planted("extra_collective", [1], n=3, reason="another round of the loop", family="extra", origin="held out 2026-11-22")
def test_one_batch_more_in_a_trainer(ddp: DDP) -> None:
    LoopTrainer(ddp.wrap(net()), ddp.rank).fit(4 if ddp.rank == 1 else 3)
    dist.barrier()


def send_metrics(row: torch.Tensor, callbacks: int) -> None:
    for _ in range(callbacks):
        dist.send(row, 0)  # HERE


@planted(
    "p2p_unmatched",
    [3],
    n=4,
    marked=True,
    miss="a message that took another one's place",
    family="extra",
    origin="libraries",
)
def test_a_callback_that_was_restored_twice(group):
    row = torch.full((4096,), float(group.rank))
    if group.rank == 0:
        for _ in range(3):
            dist.recv(row)
    else:
        time.sleep(1.0 if group.rank == 2 else 0.1)
        send_metrics(row, callbacks=2 if group.rank == 3 else 1)
    dist.barrier()


class Stopping:
    def on_epoch(self, rank, epoch):
        dist.all_reduce(torch.zeros(1), op=dist.ReduceOp.MAX)
        if (rank, epoch) == (2, 0):
            dist.all_reduce(torch.zeros(1), op=dist.ReduceOp.MAX)  # HERE


class Saving:
    def on_epoch(self, rank, epoch):
        dist.barrier()


@planted("extra_collective", [2], n=3, marked=True, family="extra", origin="generated 2026-11-25")
def test_a_callback_asks_twice_in_the_first_epoch(group):
    for epoch in range(3):
        dist.all_reduce(torch.ones(4))
        for callback in (Stopping(), Saving()):
            callback.on_epoch(group.rank, epoch)


def where():
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class MetricCallback:
    def on_epoch_end(self, trainer):
        pass


class BestMetric(MetricCallback):
    def on_epoch_end(self, trainer):
        if trainer.rank == 0 and trainer.epoch == 2:
            trainer.best = max(trainer.best, trainer.evaluate())  # HERE


class MetricTrainer:
    def __init__(self, callbacks):
        (self.rank, self.world), self.callbacks = where(), callbacks
        self.model, self.epoch, self.best = nn.Linear(4, 1), 0, -1e9

    def evaluate(self):
        score = -self.model(torch.randn(8, 4)).pow(2).mean().detach()
        dist.all_reduce(score)  # HERE
        return score.item() / self.world

    def fire(self, name):
        for callback in self.callbacks:
            getattr(callback, name)(self)

    def fit(self, epochs):
        for self.epoch in range(epochs):
            seed = [self.epoch * 17]
            dist.broadcast_object_list(seed, src=0)  # HERE
            torch.manual_seed(seed[0] + self.rank)
            self.model(torch.randn(8, 4)).mean().backward()
            self.fire("on_epoch_end")


@planted(
    "extra_collective",
    [0],
    n=4,
    marked=True,
    family="extra",
    origin="bug reports 2026-11-23",
)
def test_callback_evaluates_on_main():
    """A callback under `rank == 0` calls evaluate, which reduces the score over all ranks; the others are in the broadcast of the next epoch's seed."""
    trainer = MetricTrainer([MetricCallback(), BestMetric()])
    trainer.fit(5)


@planted("skipped_collective", [1], n=3, marked=True, family="skip", origin="generated 2026-11-23")
def test_does_not_evaluate(ddp):
    Trainer(ddp, 1, "does not evaluate", [Stop(), Loss()]).fit()


@planted("skipped_collective", [1], n=2, marked=True, family="skip", origin="generated 2026-11-23")
def test_drops_a_batch(ddp):
    Trainer(ddp, 1, "drops a batch", [Stop(), Save(), Norm()]).fit()


@planted("skipped_collective", [0], n=2, marked=True, family="skip", origin="generated 2026-11-23")
def test_raises_in_the_first_step_of_an_epoch(ddp):
    Trainer(ddp, 0, "raises", [Loss(), Stop()]).fit()


@planted("skipped_collective", [3], n=4, marked=True, family="skip", origin="generated 2026-11-23")
def test_raises_where_a_half_reduces_next(ddp):
    Trainer(ddp, 3, "raises", [Stop(), Norm(), Pair(4)], at=2).fit()


@planted("skipped_collective", [1], n=3, reason="left the loop", family="skip", origin="held out 2026-11-22")
def test_one_batch_less_in_a_trainer(ddp: DDP) -> None:
    LoopTrainer(ddp.wrap(net()), ddp.rank).fit(3 if ddp.rank == 1 else 4)
    dist.barrier()


@planted("skipped_collective", [1], n=3, reason="left the loop", family="skip", origin="review")
def test_one_batch_less_in_an_epoch(ddp: DDP) -> None:
    trainer = LoopTrainer(ddp.wrap(net()), ddp.rank)
    for _ in range(2):
        trainer.fit(3 if ddp.rank == 1 else 4)
        dist.barrier()


class EarlyStop:
    def __init__(self, skips):
        self.skips = skips

    def on_epoch(self, epoch):
        if epoch != self.skips:
            dist.all_reduce(torch.zeros(1), op=dist.ReduceOp.MAX)  # HERE


class VotingSave:
    def on_epoch(self, epoch):
        dist.barrier()


@planted(
    "skipped_collective",
    [0],
    marked=True,
    reason="ahead in the program",
    family="skip",
    origin="public reports 2026-11-25",
)
def test_a_callback_leaves_its_vote_out(group):
    callbacks = [EarlyStop(1 if group.rank == 0 else None), VotingSave()]
    step = 0
    for epoch in range(3):
        for _ in range(3):
            dist.all_reduce(torch.ones(4))
            if step % 2 == 0:
                dist.all_reduce(torch.ones(1))
            step += 1
        for callback in callbacks:
            callback.on_epoch(epoch)


class EarlyStopping:
    def __init__(self, patience):
        self.patience, self.best, self.bad = patience, float("inf"), 0

    def should_stop(self, loss):
        self.bad = 0 if loss < self.best else self.bad + 1
        self.best = min(self.best, loss)
        return self.bad >= self.patience


@planted("skipped_collective", [4], n=5, marked=True, family="skip", origin="bug reports 2026-11-23")
def test_early_stop_by_local_loss():
    """Rank 4 stops early by its own validation loss, which is not reduced, and leaves the loop; the others go on and wait for its gradient."""
    rank, world = where()
    stopper = EarlyStopping(patience=3)
    weight = torch.zeros(6)
    for epoch in range(12):
        grad = torch.randn(6)
        dist.all_reduce(grad)  # HERE
        weight -= 0.1 * grad / world
        validation = 1.0 / (epoch + 1) if rank != 4 else 1.0 + epoch
        if stopper.should_stop(validation):
            break  # HERE
    dist.barrier()  # HERE
