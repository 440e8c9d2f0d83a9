"""Training that reports: metrics, logs and evaluations that one rank reduces differently."""

from __future__ import annotations

import io
import logging
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from pytest_nsa import fixtures
from tests_cpu.faults.planting import AT, batch, loss_of, net, planted


def gather(values: torch.Tensor, world_size: int) -> list[object]:
    rows: list[object] = [None] * world_size
    dist.all_gather_object(rows, values.tolist())  # HERE
    return rows


def average(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        dist.all_reduce(tensor)  # HERE


class Shares:
    """A loader whose length is what all ranks have."""

    def __init__(self, rank: int) -> None:
        self.own = 4 + rank

    def __len__(self) -> int:
        lengths = gather(torch.tensor([self.own]), dist.get_world_size())  # HERE
        return min(int(n[0]) for n in lengths)  # type: ignore[index]

    def __iter__(self):
        for _ in range(len(self)):
            yield torch.ones(4)


@planted("extra_collective", [1], n=3, where="in gather", family="extra", origin="generated 2026-11-23")
def test_a_look_whether_there_is_a_loader(group):
    """`if loader` asks for its length, and so for every rank's; it lies between two rounds of the same calls."""
    for epoch in range(3):
        loader = Shares(group.rank)
        for i, batch in enumerate(loader):
            average([batch, torch.ones(2)])
            if (group.rank, epoch, i) == (1, 1, 2) and loader:  # HERE
                epoch += 0


@planted("extra_collective", [2], n=3, marked=True, family="extra", origin="generated 2026-11-23")
def test_a_report_after_so_many_calls(group):
    """Two forwards in a step on one rank: the step has no backward yet, but it has left nothing out."""
    network = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    made = 0

    def predict(x: torch.Tensor) -> torch.Tensor:
        nonlocal made
        made += 1
        out = network(x)
        if made % 4 == 0:
            gather(torch.tensor([made]), 3)  # HERE
        return out

    for step in range(12):
        out = predict(torch.ones(2, 4))
        if (group.rank, step) == (2, AT + 2):
            out = (out + predict(torch.ones(2, 4))) / 2  # HERE
        optimizer.zero_grad()
        out.square().mean().backward()
        for p in network.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()


class MeanMeter:
    def __init__(self) -> None:
        self.values = torch.zeros(3)

    def sync(self) -> torch.Tensor:
        dist.all_reduce(self.values)  # HERE
        return self.values / dist.get_world_size()


def evaluate(meter: MeanMeter, samples: int) -> None:
    seen = torch.tensor([samples])
    dist.all_reduce(seen)
    meter.sync()


@planted("extra_collective", [0], n=3, marked=True, family="extra", origin="generated 2026-11-23")
def test_a_helper_is_called_from_a_second_place(group):
    meter, norm = MeanMeter(), torch.ones(1)
    for step in range(6):
        evaluate(meter, 8)
        dist.all_reduce(norm, op=dist.ReduceOp.MAX)
        if (group.rank, step) == (0, AT):
            meter.sync()  # HERE
        dist.broadcast(norm, 0)


@planted("extra_collective", [0], n=3, family="extra", origin="held out 2026-11-22")
def test_the_loss_is_reduced_for_the_log_of_one_rank(ddp: fixtures.DDP) -> None:
    model = ddp.wrap(net())
    for step in range(6):
        loss = loss_of(model, batch(ddp.rank, step))
        loss.backward()
        if step == AT and ddp.rank == 0:
            dist.all_reduce(loss.detach())


class Counted:
    """Reduces its counts when so many samples have come."""

    def __init__(self, every):
        self.every, self.seen, self.counts = every, 0, torch.zeros(2, 8, dtype=torch.float64)

    def add(self, number):
        self.seen += number
        if self.seen >= self.every:  # HERE
            self.seen -= self.every
            dist.all_reduce(self.counts.clone())  # HERE


@planted("extra_collective", [1], n=3, marked=True, family="extra", origin="unseen 2026-11-26")
def test_counts_are_due_by_a_rank_s_own_samples(group):
    """gloo ends the others over the sizes; what tells is that this rank has made the step's reduction, and they the next one's."""
    model = DDP(nn.Linear(5, 20))
    optimizer, counted = torch.optim.SGD(model.parameters(), lr=0.1), Counted(64)
    for _ in range(10):
        size = 20 if group.rank == 1 else 16
        loss = model(torch.randn(size, 5)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        counted.add(size)


class Log:
    def on_step_end(self, step):
        if dist.get_rank() == 0 and step % 3 == 2:
            dist.all_reduce(torch.ones(1))  # HERE


@planted("extra_collective", [0], n=3, marked=True, family="extra", origin="unseen 2026-11-25")
def test_a_logger_reduces_on_rank_zero_alone(group):
    callbacks = [Log()]
    for step in range(6):
        dist.all_reduce(torch.ones(129))
        loss = torch.ones(1)
        dist.all_reduce(loss)
        for callback in callbacks:
            callback.on_step_end(step)


def reduce_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def mean_of(value):
    total = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(total)  # HERE
    return total.item() / dist.get_world_size()


@planted(
    "extra_collective",
    [3],
    n=4,
    marked=True,
    reason="is selected by a condition on the rank",
    family="extra",
    origin="unseen 2026-11-26",
)
def test_the_last_rank_prints_a_mean(group):
    """The others are in the loop over parameters that it has left, as ever, by the end of its step."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    for step in range(12):
        model(torch.randn(4, 6)).sum().backward()
        reduce_gradients(model)
        if step % 5 == 4 and group.rank == dist.get_world_size() - 1:
            print(f"step {step}: {mean_of(1.0)}")  # HERE


@planted("extra_collective", [0], n=3, marked=True, family="extra", origin="unseen 2026-11-26")
def test_an_evaluation_through_the_wrapper_on_one_rank(group):
    """What DDP broadcasts before a forward is counted apart from the others' call, over which gloo ends them."""
    model = DDP(nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8)))
    for _ in range(3):
        for _ in range(3):
            model(torch.randn(4, 5)).sum().backward()
        if group.rank == 0:
            with torch.no_grad():
                model(torch.randn(16, 5))  # HERE
        dist.broadcast(torch.zeros(4), 0)


def where():
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def evaluate_remainder(model, batches, world):
    outputs = []
    for batch in batches:
        mine = model(batch).detach()
        parts = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(parts, mine)  # HERE
        outputs += parts
    return torch.cat(outputs).mean()


@planted("extra_collective", [2], n=3, marked=True, family="extra", origin="bug reports 2026-11-23")
def test_eval_remainder_to_last():
    """The remainder of the evaluation set goes to the last rank, which gathers one batch more than the others do."""
    rank, world = where()
    torch.manual_seed(0)
    data, model = torch.randn(28, 8), nn.Linear(8, 2)
    each = len(data) // (world * 4) * 4
    mine = data[rank * each : (rank + 1) * each] if rank < world - 1 else data[rank * each :]
    for epoch in range(2):
        evaluate_remainder(model, mine.split(4), world)  # HERE
        dist.barrier()  # HERE


@planted("extra_collective", [0], n=3, family="extra", origin="held out 2026-11-22")
def test_rank_0_evaluates_the_wrapped_model(ddp: fixtures.DDP) -> None:
    model = ddp.wrap(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
    for step in range(6):
        loss_of(model, batch(ddp.rank, step)).backward()
        if step == AT:
            if ddp.rank == 0:
                with torch.no_grad():
                    model(batch(0, step))  # broadcasts its buffers
            dist.barrier()


def ranks():
    return dist.get_rank(), dist.get_world_size()


def average_gradients(model):
    flat = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    at = 0
    for p in model.parameters():
        p.grad.copy_(flat[at : at + p.numel()].view_as(p))
        at += p.numel()


class GlobalMean:
    """A number for the log that is averaged only if somebody prints it."""

    def __init__(self, value):
        self.value = value

    def __str__(self):
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, self.value)  # HERE
        return f"{sum(everyone) / len(everyone):.4f}"


@planted("extra_collective", [2], n=4, marked=True, family="extra", origin="bug reports 2026-11-23")
def test_debug_level_on_one_rank():
    """The log level of rank 2 is DEBUG, so its logger formats a lazy mean, whose __str__ gathers from all ranks; the others drop the record unformatted."""
    rank, _ = ranks()
    log = logging.Logger(f"train.{rank}", level=logging.DEBUG if rank == 2 else logging.INFO)
    log.addHandler(logging.StreamHandler(io.StringIO()))
    model = nn.Linear(3, 1)
    for step in range(8):
        model.zero_grad()
        loss = model(torch.randn(4, 3)).square().mean()
        loss.backward()
        average_gradients(model)
        if step % 2 == 0:
            log.info("step %d", step)
        elif step == 5:
            log.debug("global loss %s", GlobalMean(float(loss.detach())))  # HERE


class WeightWatch:
    """Logs the norm of a sharded weight, on the last rank, where the progress bar is."""

    def __init__(self, rank, world):
        self.active = rank == world - 1

    def log(self, step, weight):
        if self.active and step == 3:
            norm = weight.full_tensor().norm()  # HERE
            print(f"step {step}: |w| = {norm:.3f}")


@planted("extra_collective", [3], n=4, marked=True, family="extra", origin="bug reports 2026-11-23")
def test_dtensor_norm_of_last_rank():
    """Only rank 3 calls full_tensor for its log line; the others go on to the reduction of the next matrix product."""
    rank, world = where()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    weight = distribute_tensor(torch.randn(16, 16), mesh, [Shard(0)])
    watch = WeightWatch(rank, world)
    for step in range(6):
        x = DTensor.from_local(torch.randn(4, 4), mesh, [Shard(1)])
        y = (x @ weight).redistribute(mesh, [Replicate()]).to_local()  # HERE
        weight = weight * (1 - 1e-3 * float(y.sum().sign()))
        watch.log(step, weight)  # HERE


def small(ddp) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = ddp.wrap(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()  # HERE
    optimizer.step()
    return loss.item()


@planted("skipped_collective", [1], n=2, marked=True, family="skip", origin="generated 2026-11-23")
def test_a_report_that_comes_a_step_late(ddp):
    model, optimizer = small(ddp)
    seen = 0
    for step in range(12):
        train_step(model, optimizer)
        if ddp.rank == 1 and step == 4:
            continue  # an outlier: it is not counted
        seen += 1
        if seen % 3 == 0:
            report: list[object] = [None] * ddp.world_size
            dist.all_gather_object(report, step)  # HERE


@planted("skipped_collective", [1], n=4, marked=True, family="skip", origin="generated 2026-11-23")
def test_a_name_that_one_rank_has_not(ddp):
    """After it the rank is a call ahead: DDP's own call of the next step is no sign that the loop has not come round."""
    model, optimizer = small(ddp)
    for step in range(6):
        train_step(model, optimizer)
        names = ["loss", "accuracy"] + ["length"] * ((ddp.rank, step) != (1, AT))
        for _ in names:
            dist.all_reduce(torch.ones(1))  # HERE


@planted("skipped_collective", [1], family="skip", origin="first corpus")
def test_a_metric_that_one_rank_does_not_reduce(ddp: fixtures.DDP) -> None:
    model = ddp.wrap(net())
    for step in range(6):
        loss = loss_of(model, batch(ddp.rank, step))
        loss.backward()
        if not (ddp.rank == 1 and step == AT):
            dist.all_reduce(loss.detach())


class Mean:
    def __init__(self, value: float) -> None:
        self.value = value

    def sync(self) -> float:
        x = torch.tensor([self.value, 1.0])
        dist.all_reduce(x)  # HERE
        return float(x[0] / x[1])


class All:
    def __init__(self, value: float) -> None:
        self.value = value

    def sync(self) -> list[float]:
        parts = [torch.zeros(1) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, torch.tensor([self.value]))  # HERE
        return torch.cat(parts).tolist()


@planted(
    "collective_mismatch", [2], n=3, marked=True, miss="an order by values", family="swap", origin="unseen 2026-11-25"
)
def test_metrics_in_the_order_of_their_values(group):
    for epoch in range(5):
        loss = 0.1 if (group.rank, epoch) == (2, AT) else 1.0
        metrics = {"loss": Mean(loss), "recall": All(0.5)}
        dist.barrier()
        for name in sorted(metrics, key=lambda name: -metrics[name].value):
            metrics[name].sync()  # HERE


@planted(
    "collective_mismatch",
    [1],
    n=3,
    marked=True,
    family="swap",
    origin="unseen 2026-11-25",
    miss="an order by the first value",
)
def test_metrics_in_the_order_of_their_first_batch(group):
    book: dict[str, Mean | All] = {}
    for kind in (All, Mean) if group.rank == 1 else (Mean, All):
        book[kind.__name__] = kind(1.0)
    dist.all_reduce(torch.ones(3))
    _ = {name: metric.sync() for name, metric in book.items()}


# Ray: operation mismatch. A meter that reduces to one rank where its site says so, and to all elsewhere; the site of
# one rank is another (torchmetrics' and Lightning's `reduce_fx` questions are of this kind).
class SinkMeter:
    def __init__(self, environ: dict[str, str]) -> None:
        self.sink = environ.get("METER_SINK")
        self.values: list[float] = []

    def update(self, value: float) -> None:
        self.values.append(value)

    def synchronise(self) -> torch.Tensor:
        total = torch.tensor([sum(self.values), float(len(self.values))])
        self.values.clear()
        if self.sink is None:
            dist.all_reduce(total)  # HERE
        else:
            dist.reduce(total, dst=int(self.sink))  # HERE
        return total


def site_settings(rank: int, epoch: int) -> dict[str, str]:
    settings = {}
    if rank == 2 and epoch >= 3:  # its node was drained, and it went on elsewhere
        settings["METER_SINK"] = "0"  # HERE
    return settings


@planted("collective_mismatch", [2], n=3, marked=True, family="mismatch", origin="bug reports 2026-11-23")
def test_meter_with_a_sink(group):
    for epoch in range(6):
        meter = SinkMeter({**os.environ, **site_settings(group.rank, epoch)})
        for step in range(5):
            meter.update(epoch + step / 5)
        total = meter.synchronise()
        assert total[1] > 0
        dist.barrier()
