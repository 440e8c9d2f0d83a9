"""A trainer with callbacks, epochs and evaluations in which one rank makes a round more, leaves a statement out, or takes another
way below the same line. HERE marks the lines that a verdict may name.

After generated programs, and programs whose authors had not read the rules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests_cpu.faults.planting import planted


class Callback:
    def on_step(self, trainer: Trainer) -> None: ...
    def on_eval(self, trainer: Trainer) -> None: ...
    def on_epoch(self, trainer: Trainer) -> None: ...


class Loss(Callback):
    def on_step(self, trainer: Trainer) -> None:
        dist.all_reduce(torch.ones(1))


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


@planted("extra_collective", [2], n=4, marked=True, miss="a count of the rounds")
def test_a_batch_more(ddp):
    Trainer(ddp, 2, "a batch more", [Loss(), Stop(), Save()]).fit()


@planted("extra_collective", [1], n=2, marked=True, miss="a count of the rounds")
def test_a_batch_more_of_two(ddp):
    Trainer(ddp, 1, "a batch more", [Stop(), Save()]).fit()


@planted("extra_collective", [2], n=3, marked=True)
def test_a_batch_more_to_evaluate(ddp):
    Trainer(ddp, 2, "a batch more to evaluate", [Save(), Loss()]).fit()


@planted("extra_collective", [1], n=5, marked=True)
def test_evaluates_again(ddp):
    Trainer(ddp, 1, "evaluates again", [Norm(), Pair(5)], at=2).fit()


@planted("extra_collective", [0], n=2, marked=True)
def test_a_table_of_one_rank(ddp):
    Trainer(ddp, 0, "a table", [Loss(), Norm()], at=2).fit()


@planted("skipped_collective", [1], n=3, marked=True)
def test_does_not_evaluate(ddp):
    Trainer(ddp, 1, "does not evaluate", [Stop(), Loss()]).fit()


@planted("skipped_collective", [1], n=2, marked=True)
def test_drops_a_batch(ddp):
    Trainer(ddp, 1, "drops a batch", [Stop(), Save(), Norm()]).fit()


@planted("skipped_collective", [0], n=2, marked=True)
def test_raises_in_the_first_step_of_an_epoch(ddp):
    Trainer(ddp, 0, "raises", [Loss(), Stop()]).fit()


@planted("skipped_collective", [3], n=4, marked=True)
def test_raises_where_a_half_reduces_next(ddp):
    Trainer(ddp, 3, "raises", [Stop(), Norm(), Pair(4)], at=2).fit()


class Reducer:
    """Reduces a gradient in one of two ways, of which each rank has found one the faster."""

    def __init__(self) -> None:
        self.how: Callable[[torch.Tensor], None] = self.flat

    def flat(self, gradient: torch.Tensor) -> None:
        dist.all_reduce(gradient)

    def tree(self, gradient: torch.Tensor) -> None:
        dist.reduce(gradient, 0)  # HERE
        dist.broadcast(gradient, 0)


@planted("collective_mismatch", [3], n=4, marked=True)
def test_another_way_to_reduce(group):
    reducer = Reducer()
    for step in range(9):
        if step == 4 and group.rank == 3:
            reducer.how = reducer.tree
        reducer.how(torch.ones(1000))


@planted("skipped_collective", [1, 2], n=4, marked=True)
def test_two_ranks_take_the_group_of_another_node(group):
    nodes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for step in range(10):
        gradient = torch.ones(6)
        if step < 4:
            dist.all_reduce(gradient)
        else:
            dist.all_reduce(gradient, group=nodes[group.rank % 2])  # HERE
        if step % 3 == 2:
            dist.all_reduce(gradient.norm())


class Tree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word, self.join = nn.Embedding(20, 6), nn.Linear(12, 6)

    def forward(self, tree: Any) -> torch.Tensor:
        if isinstance(tree, int):
            return self.word(torch.tensor([tree]))
        both = self.join(torch.cat([self.forward(part) for part in tree], 1))
        mean = both.detach().mean(0)
        dist.all_reduce(mean)  # HERE
        return both - mean


@planted("extra_collective", [1], n=3, marked=True)
def test_a_tree_that_is_deeper(group):
    encoder = Tree()
    for step in range(8):
        deeper = (group.rank, step) == (1, 3)
        encoder((((0, 1), (2, 3)), 4) if deeper else ((0, 1), (2, 3)))
        dist.all_reduce(torch.tensor([5 if deeper else 4]))
        dist.all_reduce(torch.ones(100))


@planted("skipped_collective", [1], n=2, marked=True)
def test_two_forwards_a_step_and_fewer_steps(group):
    """Every other forward has no backward of its own: that is this program's habit."""
    model = nn.Linear(5, 2)
    for _ in range(7 - group.rank):
        guess = model(torch.randn(4, 5)).softmax(-1)
        (model(torch.randn(4, 5)).square().mean() - guess.log().mean()).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)  # HERE
    weights: list[object] = [None, None]
    dist.all_gather_object(weights, group.rank)
