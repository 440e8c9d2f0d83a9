"""The tracers on a user's module: what they log, and what they leave on disk."""

import functools
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nsa import train
from nsa.trace.board import RING_SIZE, Board
from nsa.trace.calls.arguments import in_runs, keys_of_call
from nsa.trace.frames import CALLERS, call_path
from nsa.trace.gradients import GradientTrace
from nsa.trace.module_backward import ModuleBackwardTrace
from pytest_nsa.evidence.board import BoardReader
from pytest_nsa.evidence.collectives import parse_ranks


class Detached(nn.Module):
    """A module whose second layer takes no part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x) + self.layers[1](x).detach()


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="nsa.trace")
    return caplog


def test_missing_gradients_are_named_in_the_fixed_format(lines: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    model = Detached()
    with GradientTrace(model) as trace:
        model(torch.ones(1, 4)).sum().backward()
        missing = trace.report(1, tmp_path / "missing.txt", rank=3)
    assert missing == ["layers.1.weight", "layers.1.bias"]
    assert lines.messages == [
        "[GRAD-TRACE] after_backward_step1 arrived=2 missing=2",
        "  - MISSING: layers.1.weight",
        "  - MISSING: layers.1.bias",
    ]
    assert (tmp_path / "missing.txt").read_text() == "step1 layers.1.weight rank=3\nstep1 layers.1.bias rank=3\n"


def test_modules_whose_backward_never_ran_are_named(lines: pytest.LogCaptureFixture) -> None:
    model = Detached()
    trace = ModuleBackwardTrace(model)
    model(torch.ones(1, 4, requires_grad=True)).sum().backward()
    assert trace.report(1) == ["layers.1"]
    assert "[MODULE-BWD] step=1 module=layers.0" in lines.messages
    assert "  - NOT REACHED: layers.1" in lines.messages


class Shifted(nn.Module):
    """A model of layers that no input asks a gradient of; each output, of two, is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Pair(), Pair()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x, other = layer(x)["both"]
            x += other
        return x


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 2.0))

    def forward(self, x: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        return {"both": (x * self.weight, self.weight)}  # a parameter outlives the step


@pytest.mark.filterwarnings("error")
def test_the_trace_of_modules_changes_nothing(lines: pytest.LogCaptureFixture) -> None:
    model, expected = Shifted(), Shifted()
    expected(torch.ones(1, 4)).sum().backward()
    trace = ModuleBackwardTrace(model)
    for step in (1, 2):
        trace.reset(step)
        model.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        assert trace.report(step) == []
    assert [m for m in lines.messages if "module=" in m] == [
        f"[MODULE-BWD] step={step} module=layers.{layer}" for step in (1, 2) for layer in (1, 0)
    ]
    for mine, its in zip(model.parameters(), expected.parameters(), strict=True):
        assert mine.grad.equal(its.grad)
    trace.close()
    assert not any(p._backward_hooks for p in model.parameters())


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # by the compiler, of a tensor in a frame that it resumes
def test_a_trace_for_each_step_compiles_nothing_again() -> None:
    model = Detached()
    compiled = torch.compile(model, backend="aot_eager")
    new, old = (
        {"recompile_limit": 2, "fail_on_recompile_limit_hit": True},
        {"cache_size_limit": 2, "fail_on_cache_limit_hit": True},
    )
    limits = new if hasattr(torch._dynamo.config, "recompile_limit") else old  # the old ones are those of torch 2.6
    with torch._dynamo.config.patch(limits):
        for step in range(5):
            trace = ModuleBackwardTrace(model)
            trace.reset(step)
            compiled(torch.ones(1, 4)).sum().backward()
            assert trace.not_reached() == ["layers.1"]
            trace.close()


def test_a_training_leaves_the_logger_as_it_was(tmp_path: Path) -> None:
    """A process that trains, or is refused, goes on to log what its own traces find."""
    log = logging.getLogger("nsa.trace")
    before = log.level, log.propagate, list(log.handlers)
    arguments = ["--config", "configs/tiny_cpu.yaml", "--steps", "1", "--out", str(tmp_path / "out")]
    assert train.main(arguments) == 0
    assert (log.level, log.propagate, log.handlers) == before
    assert train.main([*arguments, "--set", "model.backend=flash"]) == 2
    assert (log.level, log.propagate, log.handlers) == before
    (tmp_path / "other" / "traces.log").mkdir(parents=True)  # a file that cannot be opened
    assert train.main([*arguments[:-1], str(tmp_path / "other")]) == 2
    assert (log.level, log.propagate, log.handlers) == before


def test_a_board_reads_back_what_was_written(tmp_path: Path) -> None:
    board = Board(tmp_path / "board.bin", rank=3, world_size=4)
    board.begin_forward()
    for place in (0, 4, 7):
        board.called(place, board.padded(f"blocks.{place}"))
    board.begin_backward()
    board.called(4, board.padded("blocks.4"))  # a recomputation
    board.phase("backward")
    board.number("gradients_expected", 3)
    board.arrival(1, board.padded("blocks.4.attn.out.weight", "parameter"))(None)
    first = board.enter("allreduce", "0", 1, "float32", 16, "/a/b.py:3 in f", size=4)
    board.enter("barrier", "0", 2, "", 0, "/a/b.py:9 in f", size=4)
    board.leave(first)
    snapshot = BoardReader(tmp_path / "board.bin").read()
    assert (snapshot.phase, snapshot.parameter, snapshot.arrived) == ("backward", "blocks.4.attn.out.weight", b"\0\1\0")
    assert (snapshot.module, snapshot.path, snapshot.numbers["gradients"]) == ("blocks.4", (0, 4, 7), 1)
    assert [c.op for c in snapshot.collectives] == ["allreduce", "barrier"]
    assert [c.op for c in snapshot.inside] == ["barrier"]
    assert snapshot.collectives[0].describe() == "allreduce #1 (float32 x 16) at /a/b.py:3 in f"


def test_the_ring_keeps_the_newest(tmp_path: Path) -> None:
    board = Board(tmp_path / "board.bin", rank=0, world_size=1)
    for number in range(RING_SIZE + 10):
        board.leave(board.enter("allreduce", "0", number, "float32", 1, "", size=1))
    snapshot = BoardReader(tmp_path / "board.bin").read()
    assert [c.sequence for c in snapshot.collectives] == list(range(10, RING_SIZE + 10))
    assert snapshot.inside == ()


def helper() -> tuple[str, str]:
    return call_path(depth=0)


def nested(depth: int) -> tuple[str, str]:
    return helper() if depth == 0 else nested(depth - 1)


def test_a_helper_has_a_way_for_each_place_that_calls_it() -> None:
    one = helper()
    other = helper()
    assert one[0] == other[0], "one line calls"
    assert one[0].endswith("in helper")
    assert one[1] != other[1], "two lines led there"
    test = "test_a_helper_has_a_way_for_each_place_that_calls_it"
    assert all(way[1].split(" < ")[0].startswith("test_trace.py:") for way in (one, other))
    assert all(way[1].split(" < ")[0].endswith(f" in {test}") for way in (one, other))
    again = {helper() for _ in range(3)}
    assert len(again) == 1, "one way, however often"


def test_of_a_deep_way_the_innermost_callers_are_kept() -> None:
    site, callers = nested(10)
    assert site.endswith("in helper")
    assert [place.rpartition(" in ")[2] for place in callers.split(" < ")] == ["nested"] * CALLERS


def test_one_line_of_the_program_has_several_ways_into_a_library() -> None:
    library: dict[str, Any] = {}
    source = "def gather(call):\n    return call()\n\ndef compute(call):\n    return [gather(call),\n            gather(call)]\n"
    exec(compile(source, "/env/lib/site-packages/metrics/sync.py", "exec"), library)
    one, other = library["compute"](functools.partial(call_path, depth=0, within=True))
    assert one[0] == other[0]
    assert one[0].endswith("in test_one_line_of_the_program_has_several_ways_into_a_library")
    for line, (_, callers) in ((5, one), (6, other)):
        assert callers.startswith(f"metrics/sync.py:2 in gather < sync.py:{line} in compute << ")


def test_the_ranks_of_a_group_are_recorded_in_runs() -> None:
    assert in_runs([0, 1, 2, 3, 8]) == "0-3,8"
    assert in_runs(list(range(0, 4096, 8))) == "0-4088:8"
    assert in_runs([3, 1, 0]) == "3,1,0"
    assert parse_ranks("0-999999999:0,5", 4) == (0, 1, 2, 3)  # a stranger's: of the ranks that there are
    assert parse_ranks("3,1,3,0-3", 4) == (3, 1, 0, 2)  # each once, in the order in which they are named
    assert parse_ranks("0,2,7…", 8) == () == parse_ranks("0-2;5", 8)  # cut off, and no runs
    assert parse_ranks(",".join(["0"] * 100_000) + ",1", 2) == (0,)  # no more parts are read than there are ranks
    draw = random.Random(0)
    for _ in range(300):
        ranks = draw.sample(range(64), draw.randint(1, 64))
        ranks = sorted(ranks) if draw.random() < 0.7 else ranks
        assert parse_ranks(in_runs(ranks), 64) == tuple(ranks)


def test_the_keys_of_a_store_s_call_are_named_as_the_caller_does() -> None:
    assert keys_of_call((["a", "b"],), {}) == "a, b"
    assert keys_of_call(("phase/3/done",), {}) == "phase/3/done"
    assert keys_of_call((), {"key": b"done"}) == "done"
    assert keys_of_call((), {}) == ""
