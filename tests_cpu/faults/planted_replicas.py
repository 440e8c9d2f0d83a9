"""Replicas that part, and the line that has changed one of them: between two updates, after a reduction, past the wrapper.

After sets that were written without knowing the rules. HERE marks the lines that a verdict may name.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from pytest_nsa import check_divergence
from tests_cpu.faults.planting import AT, planted


def small(seed=11):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(6, 6, generator=generator), torch.randint(0, 3, (6,), generator=generator)


def backward(model, optimizer, rank, step):
    x, y = batch(rank, step)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss.item()


class Average:
    """A moving average of a model's parameters, which may stand in for them."""

    def __init__(self, model):
        self.model = model
        self.mean = [p.detach().clone() for p in model.parameters()]

    @torch.no_grad()
    def follow(self):
        for mean, value in zip(self.mean, self.model.parameters(), strict=True):
            mean.lerp_(value, 0.2)

    @torch.no_grad()
    def stand_in(self):
        self.kept = [p.detach().clone() for p in self.model.parameters()]
        for mean, value in zip(self.mean, self.model.parameters(), strict=True):
            value.copy_(mean)  # HERE

    @torch.no_grad()
    def step_back(self):
        for kept, value in zip(self.kept, self.model.parameters(), strict=True):
            value.copy_(kept)


def picture(average, x):
    average.stand_in()  # HERE
    best = average.model(x).softmax(-1).amax(-1)
    if best.max() < 2:
        return None  # HERE
    average.step_back()
    return best


@check_divergence
@planted("silent_divergence", [0], n=3, marked=True, reason="changed before that step, by no optimizer")
def test_the_average_stays_in_place(group):
    model = DDP(small())
    optimizer, average = torch.optim.AdamW(model.parameters(), lr=0.02), Average(model.module)
    for step in range(8):
        backward(model, optimizer, group.rank, step)
        optimizer.step()
        average.follow()
        if step == AT and group.rank == 0:  # HERE
            picture(average, batch(0, step)[0])  # HERE


@check_divergence
@planted("silent_divergence", [1], n=2, marked=True, reason="gradients were changed after their reduction, by rank 1")
def test_gradients_of_a_bad_batch_are_dropped(group):
    """Of two ranks, the one whose gradients are not as they were reduced."""
    model = DDP(small())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for step in range(7):
        loss = backward(model, optimizer, group.rank, step)
        if loss > 50 or (group.rank == 1 and step == AT):  # HERE
            for parameter in model.parameters():
                parameter.grad.zero_()  # HERE
        optimizer.step()


@check_divergence
@planted("silent_divergence", [0, 1, 2], n=3, marked=True, reason="gradients were changed after their reduction")
def test_noise_of_each_rank_is_added(group):
    model = DDP(small())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    noise = torch.Generator().manual_seed(5 + group.rank)
    for step in range(6):
        backward(model, optimizer, group.rank, step)
        for parameter in model.parameters():
            parameter.grad += 0.01 * torch.randn(parameter.shape, generator=noise)  # HERE
        optimizer.step()


@check_divergence
@planted("silent_divergence", [2], n=3, marked=True, reason="rank 2 loaded a model's parameters")
def test_one_rank_goes_back_to_its_best(group):
    model = DDP(small())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    best = {name: value.clone() for name, value in model.module.state_dict().items()}
    for step in range(7):
        loss = backward(model, optimizer, group.rank, step)
        optimizer.step()
        if group.rank == 2 and step == AT and loss > 0:
            model.module.load_state_dict(best)  # HERE


@check_divergence
@planted("silent_divergence", [1], n=3, marked=True, reason="rank 1 alone updated the model past its DDP wrapper")
def test_a_rate_is_sought_on_one_rank(group):
    model = DDP(small())
    if group.rank == 1:
        probe = torch.optim.SGD(model.module.parameters(), lr=0.01)
        for step in range(2):
            x, y = batch(1, 50 + step)
            F.cross_entropy(model.module(x), y).backward()  # HERE
            probe.step()  # HERE
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        backward(model, optimizer, group.rank, step)
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
@planted("silent_divergence", [0, 1], n=2, marked=True, reason="level")
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
@planted("silent_divergence", [0, 1, 2], n=3, marked=True, reason="DDP does not know")
def test_side_paths_are_added_after_the_wrapping(group):
    model = small()
    model[0].requires_grad_(False)
    ddp = DDP(model)
    optimizer = torch.optim.SGD([*model[2].parameters(), *with_side_paths(model)], lr=0.1)
    for step in range(6):
        backward(ddp, optimizer, group.rank, step)
        optimizer.step()
