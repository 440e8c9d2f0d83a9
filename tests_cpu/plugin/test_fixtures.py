"""The rank fixtures on real groups: DDP, both FSDPs, traces; and the host's fixture ``launch``."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pytest_nsa import static_graph, trace_kinds, world_size
from pytest_nsa.fixtures import DDP, FSDP, Group, Trace
from pytest_nsa.session.launch import Launch


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x


def batch(rank: int) -> torch.Tensor:
    return torch.linspace(0, 1, 16).reshape(2, 8) * (rank + 1)


def mean_gradients(num_ranks: int) -> list[torch.Tensor]:
    """Return what averaging over the ranks must give, computed on one rank alone."""
    model = Net()
    sum(model(batch(rank)).sum() / num_ranks for rank in range(num_ranks)).backward()  # type: ignore[union-attr]
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_ddp_averages_gradients(ddp: DDP) -> None:
    model = ddp.wrap(Net())
    assert isinstance(model, DistributedDataParallel)
    model(batch(ddp.rank)).sum().backward()
    for parameter, expected in zip(model.parameters(), mean_gradients(2), strict=True):
        torch.testing.assert_close(parameter.grad, expected)


def without_hook(model: nn.Module) -> nn.Module:
    """Return a model of DDP's that gets no hook of ours: one that seems to have another is left alone."""
    model._comm_hooks = ["another"]  # type: ignore[assignment]
    return model


@world_size(3)
@pytest.mark.parametrize("view", [False, True])
def test_the_bucket_hook_changes_no_bit(ddp: DDP, view: bool) -> None:
    """Gradients that stay in the buckets between backwards are divided, not multiplied, by DDP itself."""
    watched = ddp.wrap(Net(), gradient_as_bucket_view=view)
    plain = without_hook(ddp.wrap(Net(), gradient_as_bucket_view=view))
    for _ in range(3):
        for model in (watched, plain):
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.zero_()
            model(batch(ddp.rank)).sum().backward()
        pairs = list(zip(watched.parameters(), plain.parameters(), strict=True))
        assert all(torch.equal(a.grad, b.grad) for a, b in pairs)
    assert getattr(watched, "_nsa_bucket_hook", None) is not None
    assert getattr(plain, "_nsa_bucket_hook", None) is None


def test_a_hook_of_the_users_takes_the_place_of_ours(ddp: DDP) -> None:
    model = ddp.wrap(Net())
    model(batch(ddp.rank)).sum().backward()
    seen = []

    def hook(state: str, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        seen.append(state)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    hook.__annotations__.update(bucket=dist.GradBucket, **{"return": torch.futures.Future[torch.Tensor]})
    model.register_comm_hook("mine", hook)
    model.zero_grad()
    model(batch(ddp.rank)).sum().backward()
    assert seen == ["mine"]
    alone = Net()
    alone(batch(ddp.rank)).sum().backward()
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@static_graph
def test_static_graph_reaches_ddp(ddp: DDP) -> None:
    model = ddp.wrap(Net())
    assert model.static_graph is True


@pytest.mark.parametrize("version", [1, 2])
def test_fsdp_trains_as_one_process_does(fsdp: FSDP, version: int) -> None:
    if version == 2 and not hasattr(torch.cpu.Stream, "record_event"):
        with pytest.raises(RuntimeError, match=r"does not run on CPU; use --ranks-fsdp-version 1"):
            fsdp.wrap(Net(), version=2)
        return
    model = fsdp.wrap(Net(), version=version)
    model(batch(fsdp.rank)).sum().backward()
    norms = [p.grad.detach() for p in model.parameters() if p.grad is not None]
    total = sum((g.full_tensor() if hasattr(g, "full_tensor") else g).square().sum() for g in norms)
    assert isinstance(total, torch.Tensor)
    if version == 1:  # each rank holds a shard
        dist.all_reduce(total)
    torch.testing.assert_close(total, sum(g.square().sum() for g in mean_gradients(2)))


@trace_kinds("grads")
def test_fsdp1_has_no_gradients_to_count(fsdp: FSDP, trace: Trace, caplog: pytest.LogCaptureFixture) -> None:
    model = fsdp.wrap(Net(), version=1)
    with caplog.at_level("INFO", logger="nsa.trace"), trace(model):
        model(batch(fsdp.rank)).sum().backward()
    shown = [line for line in caplog.messages if line.startswith("[GRAD-TRACE]")]
    assert shown == ["[GRAD-TRACE] not counted under FSDP1"]
    with pytest.raises(RuntimeError, match="not counted under FSDP1"):
        trace.missing_gradients()


@trace_kinds("grads", "module_bwd", "ddp_buckets")
def test_trace_records_a_step(ddp: DDP, trace: Trace) -> None:
    model = ddp.wrap(Net())
    with trace(model) as step:
        model(batch(ddp.rank).requires_grad_()).sum().backward()
    assert trace.missing_gradients() == []
    assert trace.modules_not_reached() == []
    assert [count for count, _ in step.buckets] == [3 * 72]


@world_size(1)
@trace_kinds("grads")
def test_trace_names_what_is_missing(group: Group, trace: Trace) -> None:
    model = Net()
    with trace(model):
        model.blocks[0](batch(0)).sum().backward()
    assert trace.missing_gradients() == [f"blocks.{i}.{n}" for i in (1, 2) for n in ("weight", "bias")]
    with pytest.raises(RuntimeError, match=r"module backwards are not traced; use @trace_kinds\('module_bwd'\)"):
        trace.modules_not_reached()


def body_that_passes(rank: int, world_size: int, group: Group, value: int) -> None:
    assert (rank, world_size, value) == (group.rank, 4, 7)
    dist.barrier()
    print(f"rank {rank} was here")


def body_that_fails(rank: int) -> None:
    assert rank != 2, "rank two"
    dist.barrier()


def test_launch_runs_a_function_on_ranks(launch: Launch) -> None:
    outcome = launch(body_that_passes, world_size=4, arguments={"value": 7})
    assert outcome.passed, outcome.verdict
    assert "rank 3 was here" in outcome.output(3)
    limit = json.loads((outcome.folder / "job.json").read_text())["timeout"]
    assert limit == 144  # 0.8 of the limit of this suite's tests, which is below ranks_timeout


def test_launch_gives_the_verdict_to_read(launch: Launch) -> None:
    outcome = launch(body_that_fails, world_size=4, timeout=20)
    assert (outcome.verdict.outcome, outcome.verdict.cause, outcome.verdict.ranks) == ("FAIL", "rank_exception", (2,))
    assert "rank two" in outcome.verdict.reason
    assert (outcome.folder / "verdict.json").is_file()


@pytest.mark.parametrize(
    ("function", "given", "message"),
    [
        (lambda: None, {}, "must be at the top level of its module"),
        (body_that_fails, {"world_size": 0}, r"world_size=0\): must be from 1 to "),
        (body_that_fails, {"timeout": 200}, "must be below the test's own timeout of 180 s"),
        (body_that_fails, {"timeout": "2"}, r"timeout='2'\): must be a number of seconds above 0"),
        (body_that_fails, {"arguments": {"x": object()}}, "only values that JSON can hold"),
        (body_that_fails, {"arguments": [1]}, "must be a dict"),
        (body_that_passes, {"arguments": {"valeu": 7}}, "the function has no parameter valeu"),
    ],
)
def test_launch_refuses_what_ranks_could_not_run(
    launch: Launch, function: Callable[..., None], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        launch(function, **given)
