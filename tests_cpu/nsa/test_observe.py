"""The observer in programs that it must not disturb, while it counts their steps correctly."""

import copy
import io
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nsa.trace.board import Board
from nsa.trace.calls.collectives import CollectiveRecorder
from nsa.trace.names import plain_name
from nsa.trace.session import TraceSession, installed
from nsa.trace.stall.heartbeat import Heartbeat
from pytest_nsa.evidence.board import BoardReader, BoardSnapshot
from pytest_nsa.fixtures import Group
from pytest_nsa.observe.second_look import COUNTERS_REQUEST, DUMP_REQUEST
from tests_cpu.warm import WarmPython


@pytest.fixture
def session(tmp_path: Path) -> Iterator[TraceSession]:
    """Yield the tracers; once installed they stay in the process, and record nothing after `end`."""
    session = installed()
    session.begin(tmp_path, 0, 1)
    yield session
    session.end()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """Make a process group of one rank, in this process."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def board(folder: Path) -> BoardSnapshot:
    found = BoardReader(folder / "board.bin").read()
    assert found is not None
    return found


def step(model: nn.Module) -> None:
    model(torch.randn(4, 3)).sum().backward()


def test_an_evaluation_of_the_inner_module_takes_nothing_over(
    session: TraceSession, tmp_path: Path, alone: None
) -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)))
    average = copy.deepcopy(model.module)
    for _ in range(3):
        step(model)
        with torch.no_grad():
            model.module(torch.randn(4, 3))
            average(torch.randn(4, 3))
    assert board(tmp_path).numbers["step"] == 3
    assert board(tmp_path).numbers["gradients"] == board(tmp_path).numbers["gradients_expected"] == 4


def test_a_part_called_by_itself_keeps_its_name(session: TraceSession, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), nn.Linear(3, 1))
    step(model)
    model[0](torch.randn(1, 3))
    assert board(tmp_path).module == "0.1"


def test_a_model_that_is_called_in_parts_makes_one_step(session: TraceSession, tmp_path: Path) -> None:
    encoder, decoder = nn.Linear(3, 4), nn.Linear(4, 2)
    found: list[tuple[str, int]] = []
    session.observer.on_anomaly = lambda kind, step, **facts: found.append((kind, step))
    for _ in range(3):
        decoder(encoder(torch.randn(4, 3))).sum().backward()
    encoder(torch.randn(4, 3))
    step(encoder)
    assert board(tmp_path).numbers["step"] == 5
    assert found == [("no_backward", 4)], "of the step that ended with another call of its first module"


def test_models_that_are_unlike_others_run(session: TraceSession) -> None:
    lazy = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1))
    step(lazy)
    model = nn.Linear(3, 1)
    changed = {name: p * 2 for name, p in model.named_parameters()}  # not leaves
    torch.func.functional_call(model, changed, torch.randn(4, 3)).sum().backward()
    loss = lambda p, x: torch.func.functional_call(model, p, x).sum()  # noqa: E731
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, torch.randn(5, 3))


def test_a_shared_model_is_copied_and_saved_as_without_us(session: TraceSession, alone: None) -> None:
    model = DistributedDataParallel(nn.Linear(3, 1))
    step(model)
    torch.save(model.state_dict(), io.BytesIO())
    assert copy.deepcopy(model._nsa_bucket_hook) is None


@pytest.mark.parametrize("first", [True, False])
def test_a_builtin_hook_of_torch(session: TraceSession, alone: None, first: bool) -> None:
    model = DistributedDataParallel(nn.Linear(3, 1))
    if not first:
        step(model)
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    step(model)


def test_a_full_disk_ends_no_training(session: TraceSession) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    kept, session.heartbeat._file = session.heartbeat._file, os.open("/dev/full", os.O_WRONLY)
    step(nn.Linear(3, 1))
    os.close(session.heartbeat._file)
    session.heartbeat._file = kept


def test_another_thread_and_a_child_leave_the_board_alone(session: TraceSession, tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    step(model)
    before = board(tmp_path).numbers["modules_entered"]
    inside, done = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def forward(self) -> None:
            inside.set()
            done.wait(30)

    thread = threading.Thread(target=Waits())
    thread.start()
    assert inside.wait(30)
    child = os.fork()
    if child == 0:
        nn.Identity()(1)
        os._exit(0)
    os.waitpid(child, 0)
    assert board(tmp_path).numbers["modules_entered"] == before
    step(model)
    done.set()
    thread.join()
    assert board(tmp_path).numbers["step"] == 2


def test_an_exception_that_cannot_be_printed_stays_what_it_is(session: TraceSession) -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    class Raises(nn.Module):
        def forward(self) -> None:
            raise Odd

    with pytest.raises(Odd):
        Raises()()


def test_quick_phases_do_not_fill_the_disk(session: TraceSession, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        for _ in range(4000):
            model(torch.ones(1, 2))
    session.heartbeat._stop.set()
    session.heartbeat._thread.join()
    session.heartbeat.beat()  # it writes the last phase
    lines = [json.loads(line) for line in (tmp_path / "heartbeat_rank0.jsonl").read_text().splitlines()]
    assert lines[-1]["modules_entered"] == 4000
    assert 100 < len(lines) < 1100  # of 8,000 phases


COMPILES = """
import torch, torch._dynamo  # which remembers nn.Module.__call__ as it finds it: here, before ours
from nsa.trace.session import installed
session = installed()
session.begin(".", 0, 1)
torch._logging.set_logs(graph_breaks=True, recompiles=True)
model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Sequential(torch.nn.Linear(3, 1)))
x = torch.randn(4, 3)
assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(x), model(x))
optimizer = torch.optim.SGD(model.parameters())
update = torch.compile(optimizer.step, backend="eager")
phases = []
session.observer.on_change = lambda: phases.append(session.board.phase_name)
for _ in range(3):  # told each time, not only as it is compiled
    model(x).sum().backward()
    update()
assert phases == ["forward", "body", "backward", "body", "optimizer", "body"] * 3, phases
session.end()
"""


def test_a_compiled_model_keeps_one_graph_and_its_optimizer_is_seen(warm: WarmPython, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = warm.call("-c", COMPILES, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert "UserWarning" not in done.stderr
    assert "Graph break" in done.stderr  # at the tracer that the optimizer calls
    assert "calls/compiled.py" not in done.stderr  # but none in it, as it is not compiled


def test_names_lose_wrappers_alone() -> None:
    assert plain_name("module._orig_mod.vision_module.conv.weight") == "vision_module.conv.weight"


@pytest.fixture
def heart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Heartbeat:
    monkeypatch.setattr("nsa.trace.stall.heartbeat.INTERVAL", 0.003)
    board = Board(tmp_path / "board.bin")
    return Heartbeat(board, CollectiveRecorder(board), tmp_path / "heartbeat_rank0.jsonl", 0, tmp_path / "stall.json")


def test_a_heartbeat_ends_no_generator_of_the_program(heart: Heartbeat) -> None:
    """The thread that drops a frame last ends its generators: a ``finally`` with a collective would run in the heartbeat's."""
    board, ended_in = heart.board, set()

    def numbers() -> Iterator[int]:
        try:
            yield from range(10)
        finally:
            ended_in.add(threading.current_thread().name)

    def leave_early() -> int:
        numbered = numbers()
        return next(n for n in numbered if n == 3)

    heart.start()
    while board.count("beat") < 400:
        board.add("progress")
        leave_early()
    heart.stop()
    assert ended_in == {threading.main_thread().name}


def test_a_heartbeat_rests_while_stacks_are_dumped(tmp_path: Path, heart: Heartbeat) -> None:
    """A dump by signal that finds its thread in Python, a frame half made, ended a rank and made its peers raise."""
    heart.start()
    (tmp_path / COUNTERS_REQUEST).touch()
    (tmp_path / DUMP_REQUEST).touch()
    while not heart.rests:  # it answers first
        time.sleep(0.001)
    beats = heart.board.count("beat")
    time.sleep(20 * 0.003)  # a thread that rests shows it by what it does not do
    assert heart.board.count("beat") == beats
    assert (tmp_path / "counters.json").exists()
    heart.stop()


def test_a_heartbeat_answers_each_request_for_counters(tmp_path: Path, heart: Heartbeat) -> None:
    """A suspicion may be wrong, and the test continue: what was counted then is no evidence of its end."""
    heart.start()
    times = []
    for _ in range(2):
        (tmp_path / COUNTERS_REQUEST).touch()
        while (tmp_path / COUNTERS_REQUEST).exists():
            time.sleep(0.001)
        times.append(json.loads((tmp_path / "counters.json").read_text())["time"])
    heart.stop()
    assert times[0] < times[1]


def test_a_ddp_model_inside_of_a_library_s_module_is_traced(group: Group, artifacts: Path) -> None:
    """Lightning's Fabric puts a module of its own around DDP's: its reductions were not on the board."""

    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    model = Outer(DistributedDataParallel(nn.Linear(3, 2)))
    for _ in range(3):
        step(model)
    snapshot = board(artifacts / f"rank{group.rank}")
    assert [c.op for c in snapshot.collectives].count("allreduce") == 3
    assert snapshot.numbers["step"] == 3
