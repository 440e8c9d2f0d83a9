"""Real faults in tests on ranks: each is named in bounded time, nothing is left behind, and the next test passes.

More than 400 lines, as all faults run in one session, which its tests read.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pytest_nsa.testing import HEADER, ExampleResult, run_in
from tests_cpu.plugin.leftovers import processes_below
from tests_cpu.plugin.sessions import no_process_is_left, start_session, wait_for
from tests_cpu.warm import WarmPython

FAULTS = """
class InBackward(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        x = x * 1
        x.register_hook(lambda gradient: self.function())
        return x

LOCK = threading.Lock()

def step(ddp, fault):
    plant = InBackward(fault if ddp.rank == 1 else lambda: None)
    model = ddp.wrap(torch.nn.Sequential(torch.nn.Linear(4, 4), plant, torch.nn.Linear(4, 4)))
    model(torch.ones(2, 4)).sum().backward()

@world_size(2)
@pytest.mark.timeout(6)
def test_lock_in_backward(ddp):
    LOCK.acquire()
    step(ddp, lambda: LOCK.acquire())

@world_size(2)
@pytest.mark.timeout(6)
def test_python_loop(group):
    if group.rank == 1:
        while True: pass
    dist.barrier()

@world_size(2)
@pytest.mark.timeout(6)
def test_sleep(group):
    if group.rank == 0:
        time.sleep(1000)
    dist.barrier()

@world_size(2)
@pytest.mark.timeout(6)
def test_stopped(group):
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()

@world_size(2)
@pytest.mark.timeout(60)
def test_killed(ddp):
    step(ddp, lambda: os.kill(os.getpid(), signal.SIGKILL))

@world_size(2)
@pytest.mark.timeout(60)
def test_segfault(group):
    if group.rank == 0:
        import ctypes
        ctypes.string_at(0)
    dist.barrier()

@world_size(2)
@pytest.mark.timeout(60)
def test_exits(group):
    if group.rank == 1:
        os._exit(0)
    dist.barrier()

@world_size(3)
@pytest.mark.timeout(60)
def test_raises(group):
    if group.rank == 1:
        raise ValueError("first cause")
    dist.barrier()

@world_size(3)
@pytest.mark.timeout(60)
def test_skips_collective(group):
    for step in range(3):
        if not (step == 1 and group.rank == 2):
            dist.all_reduce(torch.ones(2))
        dist.broadcast(torch.ones(3), src=0)

@world_size(2)
@pytest.mark.timeout(60)
def test_left_alone(group):
    if group.rank == 0:
        dist.barrier()

@world_size(2)
@pytest.mark.timeout(60)
def test_other_dtype(group):
    t = torch.ones(4, dtype=torch.int64 if group.rank == 1 else torch.float32)
    dist.all_reduce(t)
    dist.barrier()

@world_size(2)
@pytest.mark.timeout(6)
def test_slow(group):
    for _ in range(10000):
        dist.all_reduce(torch.ones(1))
        time.sleep(0.05)

@world_size(2)
@pytest.mark.timeout(60)
def test_groups_in_opposite_order(group):
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    for g in (first, second) if group.rank == 0 else (second, first):
        dist.all_reduce(torch.ones(1), group=g)

@world_size(2)
@pytest.mark.timeout(60)
def test_loop_without_steps(group):
    for i in range(4):
        dist.all_reduce(torch.ones(1))
        if not (group.rank == 1 and i == 1):
            dist.broadcast(torch.ones(2), src=0)

@pytest.fixture
def closing_barrier(group):
    yield
    dist.barrier()

@world_size(2)
@pytest.mark.timeout(60)
def test_raises_before_a_barrier_in_teardown(group, closing_barrier):
    if group.rank == 1:
        raise ValueError("the cause")
    dist.all_reduce(torch.ones(1))

@world_size(2)
@pytest.mark.timeout(60)
def test_wraps_the_lost_connection(group):
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.barrier()
    except RuntimeError as error:
        raise ValueError("could not save the checkpoint") from error

@world_size(2)
@pytest.mark.timeout(60)
def test_own_message_sounds_like_a_victims(group):
    if group.rank == 1:
        raise TimeoutError("tokenizer server timed out after 5 s")
    dist.barrier()

@world_size(2)
@pytest.mark.timeout(60)
def test_fails_while_the_other_works(group):
    if group.rank == 0:
        time.sleep(2.5)
    assert group.rank == 0

@world_size(2)
@pytest.mark.timeout(60)
def test_killed_while_the_other_works(group):
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        sum(range(1000))

@world_size(2)
def test_next_one_passes(group):
    dist.barrier()

@world_size(3)
def test_healthy_send_while_others_have_ended(group):
    if group.rank == 0:
        work = dist.isend(torch.ones(1), 1)
        time.sleep(2.5)
        work.wait()
    elif group.rank == 1:
        dist.recv(torch.ones(1), 0)

@world_size(2)
def test_healthy_gather_then_one_is_slow(group):
    t = torch.ones(3)
    dist.gather(t, [torch.empty(3) for _ in range(2)] if group.rank == 0 else None)
    if group.rank == 1:
        time.sleep(2.5)
    dist.barrier()

@world_size(4)
def test_healthy_subgroups_while_one_is_slow(group):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    if group.rank == 3:
        time.sleep(2.5)
    dist.all_reduce(torch.ones(1), group=groups[group.rank // 2])
    dist.barrier()

@world_size(2)
def test_healthy_work_after_the_other_has_ended(group):
    if group.rank == 1:
        time.sleep(2.5)
"""

EXPECTED = {
    "test_lock_in_backward": ("HANG", "lock_deadlock", (1,)),
    "test_python_loop": ("HANG", "infinite_loop", (1,)),
    "test_sleep": ("HANG", "sleeping", (0,)),
    "test_stopped": ("HANG", "rank_stopped", (1,)),
    "test_killed": ("CRASH", "rank_died", (1,)),
    "test_segfault": ("CRASH", "rank_died", (0,)),
    "test_exits": ("FAIL", "rank_exited", (1,)),
    "test_raises": ("FAIL", "rank_exception", (1,)),
    "test_skips_collective": ("HANG", "skipped_collective", (2,)),
    "test_left_alone": ("FAIL", "extra_collective", (0,)),
    "test_loop_without_steps": ("HANG", "skipped_collective", (1,)),
    "test_raises_before_a_barrier_in_teardown": ("FAIL", "rank_exception", (1,)),
    "test_wraps_the_lost_connection": ("CRASH", "rank_died", (1,)),
    "test_own_message_sounds_like_a_victims": ("FAIL", "rank_exception", (1,)),
    "test_fails_while_the_other_works": ("FAIL", "assertion", (1,)),
    "test_killed_while_the_other_works": ("CRASH", "rank_died", (1,)),
    "test_groups_in_opposite_order": ("HANG", "group_order_deadlock", (0, 1)),
    "test_slow": ("SLOW", "slow", (0, 1)),
}


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> tuple[ExampleResult, Path]:
    """Run one session over all the faults; the tests below read what it left."""
    folder = tmp_path_factory.mktemp("faults")
    (folder / "test_example.py").write_text(HEADER + FAULTS)
    # Most of its time goes to waiting for time limits: several at a time do not disturb each other.
    return run_in(folder, "-p", "xdist", "-n", "3"), folder


@pytest.mark.parametrize("name", EXPECTED)
def test_the_fault_is_named(faults: tuple[ExampleResult, Path], name: str) -> None:
    verdict = faults[0].verdicts[name]
    # On a busy machine the host may see the wait before the finished rank's process has ended, and its connection with it.
    outcome = "FAIL" if name == "test_left_alone" and verdict.outcome == "HANG" else verdict.outcome
    assert (outcome, verdict.cause, verdict.ranks) == EXPECTED[name]
    assert verdict.where.startswith("test_example.py:") or name == "test_slow"


def test_the_line_is_the_culprits(faults: tuple[ExampleResult, Path]) -> None:
    source = (HEADER + FAULTS).splitlines()
    for name, text in {
        "test_lock_in_backward": "step(ddp, lambda: LOCK.acquire())",
        "test_python_loop": "while True: pass",
        "test_sleep": "time.sleep(1000)",
        "test_raises": 'raise ValueError("first cause")',
        "test_segfault": "ctypes.string_at(0)",
    }.items():
        line = int(faults[0].verdicts[name].where.partition(":")[2].partition(" ")[0])
        assert text in source[line - 1]


def test_a_wrong_dtype_is_blamed_on_no_innocent(faults: tuple[ExampleResult, Path]) -> None:
    verdict = faults[0].verdicts["test_other_dtype"]
    assert verdict.cause == "collective_mismatch"
    assert 1 in verdict.ranks
    assert "int64 x 4" in verdict.reason


def test_the_session_goes_on_and_leaves_nothing(faults: tuple[ExampleResult, Path]) -> None:
    result, folder = faults
    assert result.outcomes["passed"] == 5  # the healthy ones, slow as they are
    assert result.outcomes["failed"] == len(EXPECTED) + 1
    assert processes_below(folder) == []


def test_stacks_are_in_the_folder_and_in_the_report(faults: tuple[ExampleResult, Path]) -> None:
    result, _ = faults
    folder = result.folder("test_lock_in_backward")
    for rank in (0, 1):
        assert "most recent call first" in (folder / f"watchdog_stackdump_rank{rank}.txt").read_text()
    assert "stack of rank 1" in result.stdout
    assert "> test_example.py" in result.stdout
    # The dump is taken while the rank is in C++: rank 0 waits inside torch.
    assert "torch" in (folder / "watchdog_stackdump_rank0.txt").read_text()
    assert (folder / "result.txt").read_text() == "HANG\n"


def test_certain_causes_end_the_test_at_once(faults: tuple[ExampleResult, Path]) -> None:
    for name in (
        "test_killed",
        "test_segfault",
        "test_exits",
        "test_raises",
        "test_skips_collective",
        "test_left_alone",
    ):
        verdict = faults[0].verdicts[name]
        assert verdict.certain
        assert verdict.duration_s < 30  # of the 60 that the test had


def test_the_dead_ranks_signal_is_named(faults: tuple[ExampleResult, Path]) -> None:
    assert "SIGKILL" in faults[0].verdicts["test_killed"].reason
    assert "SIGSEGV" in faults[0].verdicts["test_segfault"].reason


def test_missing_parameters_are_those_of_the_interrupted_backward(faults: tuple[ExampleResult, Path]) -> None:
    assert faults[0].verdicts["test_lock_in_backward"].parameters_missing == ("0.weight", "0.bias")
    assert faults[0].verdicts["test_raises"].parameters_missing == ()


def test_the_verdict_of_a_hang_has_a_word_on_memory(faults: tuple[ExampleResult, Path]) -> None:
    for name in ("test_lock_in_backward", "test_skips_collective"):
        (fact,) = [fact for fact in faults[0].verdicts[name].evidence if fact.kind == "memory"]
        assert re.fullmatch(r".*ranks? .*held [\d,]+ MiB, of [\d,]+ MiB here: memory is not short", fact.text), (
            fact.text
        )
    assert [fact for fact in faults[0].verdicts["test_raises"].evidence if fact.kind == "memory"] == []
    assert "MiB here: memory is not short" in faults[0].stdout
    assert re.search(r"^- memory: .* held ", (faults[0].run / "SUMMARY.md").read_text(), re.M)  # type: ignore[operator]


def test_traces_log_of_a_stall_has_what_the_tracer_could_not_print(faults: tuple[ExampleResult, Path]) -> None:
    """`grep MISSING artifacts/*/traces.log`, as the plan's readers do."""
    text = (faults[0].folder("test_lock_in_backward") / "traces.log").read_text()
    assert [line for line in text.splitlines() if "- MISSING: " in line] == [
        "[rank 1]   - MISSING: 0.weight",
        "[rank 1]   - MISSING: 0.bias",
    ]


def test_diagnose_gives_the_same_from_the_folder(faults: tuple[ExampleResult, Path]) -> None:
    assert faults[0].run is not None
    done = subprocess.run(
        [sys.executable, "-m", "pytest_nsa", "diagnose", str(faults[0].run)], text=True, capture_output=True, timeout=60
    )
    assert done.returncode == 1
    for name, (_, cause, ranks) in EXPECTED.items():
        block = next(b for b in done.stdout.split("\n\n") if b.startswith(f"test_example.py::{name}\n"))
        assert f"{faults[0].verdicts[name].outcome}: " in block
        assert cause in block
        assert all(str(rank) in block for rank in ranks)


@pytest.mark.parametrize("sent", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_an_interrupted_session_leaves_no_process_and_keeps_its_artifacts(
    warm: WarmPython, tmp_path: Path, sent: signal.Signals
) -> None:
    source = (
        HEADER
        + """
@world_size(2)
def test_before(group): assert group.rank == 0

@world_size(2)
def test_waits(group, artifacts):
    (artifacts / f"running{group.rank}").touch()
    if group.rank == 1:
        time.sleep(1000)
    dist.barrier()
"""
    )
    process = start_session(warm, tmp_path, source)
    run = tmp_path / "artifacts" / "latest"
    wait_for(lambda: len(list(run.glob("*test_waits*/running*"))) == 2, process)
    time.sleep(1.5)  # the stall itself: shorter than a second, it would not count as one
    process.send_signal(sent)
    process.communicate(timeout=60)
    folder = next(run.glob("*test_waits*"))
    no_process_is_left(tmp_path)
    if sent != signal.SIGKILL:
        assert process.returncode == pytest.ExitCode.INTERRUPTED
        assert (folder / "result.txt").read_text() == "INTERRUPTED\n"
        summary = (run / "SUMMARY.md").read_text()
        assert summary.startswith("INTERRUPTED")
        assert "test_before" in summary
        # The rank that was stalled at the interrupt is reported.
        verdict = json.loads((folder / "verdict.json").read_text())
        assert (verdict["cause"], verdict["ranks"]) == ("sleeping", [1])
        assert verdict["reason"].startswith("interrupted by the user; until then rank 1 sleeps")
    # Even a killed host leaves a folder that can be diagnosed.
    done = subprocess.run(
        [sys.executable, "-m", "pytest_nsa", "diagnose", str(run.resolve()), "--json"],
        text=True,
        capture_output=True,
        timeout=60,
    )
    assert '"outcome": "FAIL", "cause": "assertion", "ranks": [1]' in done.stdout
    assert "test_example.py:14 in test_waits" in done.stdout
    assert len(done.stdout.splitlines()) == 2
