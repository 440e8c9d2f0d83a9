"""``pytest-nsa watch`` and ``diagnose`` on jobs that pytest did not start: torchrun's, of many ranks, by py-spy and by NCCL; and
NSA_TRACE_DIR: which processes leave evidence, how their ends are known, and what costs no training.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nsa.trace.board import Board
from pytest_nsa.cli.nccl import NcclService, communicators, describe, read_answer
from pytest_nsa.cli.watch import VerdictCommand, Watcher
from pytest_nsa.diagnosis.engine import diagnose
from pytest_nsa.diagnosis.verdict import Finding, Verdict
from pytest_nsa.evidence.load import load
from pytest_nsa.observe import observer
from tests_cpu.plugin.sessions import list_processes, wait_for
from tests_cpu.sockets import free_port
from tests_cpu.warm import WarmPython

TRAINING = """
import atexit, os, sys, time
import torch, torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 1)))
for step in range(200):
    if step == 20 and rank == 1:
        fault = sys.argv[1]
        if fault == "sleeps": time.sleep(1000)
        if fault == "raises": raise ValueError("bad sample")
        if fault == "calls": dist.barrier()
    if step == 20 and sys.argv[1] == "crossed": dist.recv(torch.ones(1), 1 - rank)
    model(torch.randn(4, 8)).sum().backward()
dist.destroy_process_group()
atexit._run_exitfuncs()
os._exit(0)  # past C++'s destructors: torch 2.13 itself ends every fifth such program there by SIGABRT on a busy machine
"""


Run = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "training.py").write_text(TRAINING)
    return tmp_path


@pytest.fixture
def start(warm: WarmPython, folder: Path) -> Iterator[Start]:
    """Yield a function that starts torchrun on the training with a fault; end its processes with the test."""
    started = []

    def begin(fault: str) -> subprocess.Popen[str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "RANK", "WORLD_SIZE"))}
        with (folder / "output.txt").open("wb") as output:
            process = warm.popen(
                "-m", "torch.distributed.run", "--nproc_per_node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0",
                "training.py", fault,
                cwd=folder, env={**env, "NSA_TRACE_DIR": str(folder / "run"), "OMP_NUM_THREADS": "1"},
                stdout=output, stderr=output, start_new_session=True, nursery=True,
            )  # fmt: skip
        started.append(process)
        return process

    yield begin
    for pid in list_processes(folder):
        os.kill(pid, signal.SIGKILL)
    for process in started:
        process.wait()


@pytest.fixture
def run(warm: WarmPython, folder: Path) -> Run:
    """Return a function that runs the command in the training's folder."""
    return lambda *arguments: warm.call("-m", "pytest_nsa", *arguments, cwd=folder, timeout=60)


def wait_for_ranks(folder: Path, step: str = "") -> None:
    """Wait until both ranks have heartbeats, and these have recorded a step."""

    def have_come() -> bool:
        files = [*(folder / "run").glob("heartbeat_rank*.jsonl")]
        return len(files) == 2 and all(step in file.read_text() for file in files)

    wait_for(have_come, limit_s=60)


def follow(watcher: Watcher) -> Finding | Verdict | None:
    """Return what a watcher finds, or None once the ranks have ended."""
    wait_for(lambda: watcher.look() or watcher.finding or watcher.is_over, limit_s=60)
    return watcher.finding


def test_a_rank_that_stalls_is_named_while_it_runs(run: Run, folder: Path, start: Start) -> None:
    start("sleeps")
    wait_for_ranks(folder, '"step": 20')
    done = run("watch", "--run", "run", "--once", "--json")
    seen = json.loads(done.stdout.splitlines()[-1])
    assert [r["rank"] for r in seen["ranks"]] == [0, 1]
    assert (seen["verdict"]["cause"], seen["verdict"]["ranks"]) == ("sleeping", [1])
    assert "training.py:12" in seen["verdict"]["where"]
    assert done.returncode == 1
    by_pid = run("watch", str(seen["ranks"][0]["pid"]), "--once")
    assert "suspicion: sleeping on rank 1 at " in by_pid.stdout
    assert "rank 0  step 21  backward" in by_pid.stdout
    assert "\ndo: " in by_pid.stdout
    watcher = Watcher(folder / "run")
    follow(watcher)
    first, second = ([line.partition(":")[0] for line in watcher.lines(again=False)] for _ in range(2))
    assert first[-2:] == ["suspicion", "do"]
    assert not {"suspicion", "do"}.intersection(second), "a log has it once"
    (folder / "node1").mkdir()
    for folders in (["run"], ["run", "node1"]):  # the folders of two nodes are one run
        verdict = json.loads(run("diagnose", *folders, "--json").stdout)
        assert (verdict["outcome"], verdict["cause"], verdict["ranks"]) == ("HANG", "sleeping", [1])
        if len(folders) == 1:
            (folder / "run" / "rank1").rename(folder / "node1" / "rank1")


def test_ranks_that_end_no_wait_are_named_and_asked_for_their_counters(folder: Path, start: Start) -> None:
    start("crossed")
    wait_for_ranks(folder)
    found = follow(Watcher(folder / "run"))
    assert (found.cause, found.ranks, found.where.rpartition(" in ")[2]) == ("p2p_unmatched", (0, 1), "<module>")
    assert isinstance(found, Finding)
    assert found.ends_the_test
    counted = [json.loads((folder / "run" / f"rank{rank}" / "counters.json").read_text()) for rank in (0, 1)]
    assert [of["frames"][-1]["counters"] for of in counted] == [{"step": 20}, {"step": 20}]


def test_the_statement_at_which_recorded_ranks_part(
    folder: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NSA_TRACE_FLOW", "1")
    start("calls")
    wait_for_ranks(folder)
    watcher = Watcher(folder / "run")
    follow(watcher)
    (line,) = (line for line in watcher.lines() if line.startswith("diverged at "))
    assert line.startswith("diverged at training.py:10 in <module>: `if step == 20 and rank == 1:`; ")


AT_EXIT = """
import atexit, queue, subprocess, sys, threading, time
import torch.distributed as dist

def consume():
    items.get()
    end = time.monotonic() + 3
    while time.monotonic() < end: sum(range(1000))

def feed(child):
    items.put(child.stdout.readline())

def poll():
    done = False
    while not done:
        time.sleep(0.1)

def flush():
    rows = list(range(50))
    while rows:
        time.sleep(0.1)
        rows.pop()

dist.init_process_group("gloo")
dist.destroy_process_group()
items = queue.Queue()
if FAULT == "fed":
    child = subprocess.Popen("sleep 4; echo", shell=True, stdout=subprocess.PIPE)
    threading.Thread(target=feed, args=(child,), daemon=True).start()
target = {"a variable": poll, "flushed": flush}.get(FAULT, consume)
threading.Thread(target=target).start() if FAULT != "a handler" else atexit.register(consume)
"""


@pytest.mark.parametrize(
    ("fault", "function"),
    [
        ("a thread", "consume"), ("a handler", "consume"), ("a variable", "poll"),
        *(pytest.param(fault, "", marks=pytest.mark.slow) for fault in ("fed", "flushed")),
    ],
)  # fmt: skip
def test_what_keeps_a_program_from_ending_is_named_unless_it_may_end(tmp_path: Path, fault: str, function: str) -> None:
    source = AT_EXIT.replace("FAULT", repr(fault))
    process = start_script(tmp_path, source, rank=0, size=1)
    found = follow(Watcher(tmp_path / "run"))
    process.kill()
    process.communicate()
    seen = (found.cause, found.where.rpartition(" in ")[2]) if found is not None else None
    assert seen == (("lock_deadlock", function) if function else None)


@pytest.mark.parametrize(
    ("fault", "code", "outcome"), [("raises", 1, ("FAIL", "rank_exception", [1])), ("none", 0, ("PASS", "", []))]
)
def test_how_a_training_ended_is_known_while_it_is_watched_and_from_its_folder(
    run: Run, folder: Path, start: Start, fault: str, code: int, outcome: tuple[str, str, list[int]]
) -> None:
    process = start(fault)
    watched = run("watch", "--run", "run")
    assert process.wait() == code, (folder / "output.txt").read_text()
    assert code or (watched.returncode, "done" in watched.stdout) == (0, True)
    verdict = json.loads(run("diagnose", "run", "--json").stdout)
    assert (verdict["outcome"], verdict["cause"], verdict["ranks"]) == outcome, watched.stdout


def test_a_process_that_is_no_rank(run: Run) -> None:
    other = subprocess.Popen(["sleep", "100"])
    done = run("watch", str(other.pid))
    other.kill()
    other.wait()
    assert done.returncode == 2
    assert f"process {other.pid} is neither a rank nor the launcher of ranks" in done.stderr
    assert "NSA_TRACE_DIR" in done.stderr


def test_a_watch_that_begins_before_the_training_writes_into_its_folder(tmp_path: Path) -> None:
    """The folder of another user is not written into; one that is not there yet has no owner."""
    watcher = Watcher(tmp_path / "run")
    watcher.look()
    (tmp_path / "run").mkdir()
    assert watcher.observer.log == tmp_path / "run" / "host.jsonl"


SLEEPS = """
import sys, time
from pathlib import Path
from nsa.trace.board import Board
boards = [Board(Path(sys.argv[1]) / f"rank{r}" / "board.bin", r, 12) for r in range(12)]
for rank, board in enumerate(boards):
    board.phase("body")
    board.text("line", "train.py:7 in load_undone")
    if rank != 3:
        board.enter("barrier", "0", 1, "", 0, "train.py:9 in main", size=12)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def twelve(tmp_path: Path) -> Iterator[Path]:
    """Yield the folder of twelve ranks, of which rank 3 is not in the barrier of the others."""
    for rank in range(12):
        (tmp_path / f"rank{rank}").mkdir()
    process = subprocess.Popen([sys.executable, "-c", SLEEPS, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    yield tmp_path
    process.kill()
    process.wait()
    process.stdout.close()


def test_many_ranks_are_shown_by_state_the_rarest_first(twelve: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watcher = Watcher(twelve)
    watcher.look()
    monkeypatch.setattr(watcher.observer.watch, "measure_stall", lambda rank: 2.0 + rank)
    first, second = watcher.lines()
    assert first == "    1  rank 3: step 0  body  at train.py:7 in load_undone  still for 5 s"
    assert second.startswith("   11  ranks 0-2, 4-11: step 0  body  in barrier #1 at train.py:9 in main")
    assert second.endswith("  still for 13 s")


def test_a_command_is_run_once_per_verdict(tmp_path: Path) -> None:
    command = VerdictCommand(
        f"cat >> {tmp_path / 'verdicts'}; echo $NSA_CAUSE $NSA_RANKS $NSA_RETRY >> {tmp_path / 'log'}"
    )
    verdict = {"cause": "transport_stuck", "ranks": [0, 1], "certain": False, "retry": "elsewhere", "reason": "..."}
    for _ in range(3):
        command.give([{"folder": "run", "ranks": [], "verdict": verdict}])
    command.give([{"folder": "run", "ranks": [], "verdict": None}])
    command.finish()
    assert (tmp_path / "log").read_text() == "transport_stuck 0,1 elsewhere\n"
    assert json.loads((tmp_path / "verdicts").read_text())["folder"] == "run"


def test_a_command_that_neither_reads_nor_ends_is_not_waited_for(capfd: pytest.CaptureFixture[str]) -> None:
    command = VerdictCommand("exec sleep 1000")
    for cause in ("slow", "sleeping"):
        verdict = {"cause": cause, "ranks": [0], "certain": False, "retry": "once", "reason": "x" * (1 << 20)}
        command.give([{"folder": "run", "ranks": [], "verdict": verdict}])
    running = list(command._running)
    assert [run.poll() for run in running] == [None, None]
    command.finish(0.1)
    assert capfd.readouterr().err.count("still runs after 0.1 s") == 2
    for run in running:
        run.kill()
        run.wait()


def test_a_rank_that_ends_well_while_it_is_looked_at_has_not_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rank0").mkdir()
    board = Board(tmp_path / "rank0" / "board.bin", 0, 1)
    board.phase("body")

    def ends(folder: Path, boards: object) -> dict[int, int]:
        board.phase("done")
        return {}

    monkeypatch.setattr(observer, "living_ranks", ends)
    watcher = Watcher(tmp_path)
    watcher.look()
    assert watcher.to_json()["ranks"][0]["gone"] is False
    assert watcher.finding is None


def answer(counts: dict[int, int], missing: tuple[int, ...] = ()) -> dict[str, Any]:
    """Return an answer of one communicator: AllReduce calls by rank, and the ranks that do not answer."""
    return {
        "nccl_version": "2.28.9", "timestamp": "2026-11-23 08:00:00", "communicators_count": 1,
        "communicators": [{
            "hash": "0xabc", "size": len(counts) + len(missing), "missing_ranks_count": len(missing),
            "ranks": [
                {"rank": rank, "host": "node5", "pid": 100 + rank, "cuda_dev": rank, "status": {"init_state": 0},
                 "collective_counts": {"AllReduce": n, "Broadcast": 1}}
                for rank, n in counts.items()
            ],
            "missing_ranks": [
                {"rank": rank, "host": "node6", "pid": 100 + rank, "status": {"unresponsive": True, "considered_dead": rank == 9}}
                for rank in missing
            ],
        }],
    }  # fmt: skip


BEHIND = answer({0: 7, 1: 7, 2: 5, 3: 7})


@pytest.mark.parametrize(
    ("before", "now", "shown"),
    [
        (BEHIND, BEHIND, ["4 ranks: rank 2 (node5, GPU 2, pid 102) is 2 AllReduce behind, and nothing moves"]),
        (answer({0: 6, 1: 6, 2: 5, 3: 6}), BEHIND, []),  # a skew that comes and goes is work
        (answer({0: 7, 1: 7}), answer({0: 7, 1: 7}), []),
        (
            answer({0: 7}),
            answer({0: 8}, missing=(4, 9)),
            ["3 ranks: rank 4 (node6, pid 104) does not answer", "3 ranks: rank 9 (node6, pid 109) is dead"],
        ),
    ],
    ids=["behind", "skew", "even", "missing"],
)
def test_ranks_that_are_behind_or_missing_are_named(
    before: dict[str, Any], now: dict[str, Any], shown: list[str]
) -> None:
    found = describe(communicators(before), communicators(now))
    assert found == [f"NCCL: communicator 0xabc of {line}" for line in shown]


def test_the_comma_that_2_28_9_leaves_out_is_repaired() -> None:
    whole = json.dumps(answer({0: 7}, missing=(4,)), indent=1)
    broken = whole.replace('"pid": 104,', '"pid": 104')
    assert broken != whole
    with pytest.raises(ValueError, match="delimiter"):
        json.loads(broken)
    assert read_answer(broken) == json.loads(whole)
    assert read_answer("NCCL has no job here") is None


def test_the_program_is_asked_and_never_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of that name that answers, and one that hangs; without any the service is silent."""
    program = tmp_path / "ncclras"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{json.dumps(answer({0: 3, 1: 2}))}\nEND\n")
    program.chmod(0o700)
    monkeypatch.setattr("pytest_nsa.cli.nccl.AGAIN_S", 0.0)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    service = NcclService()
    wait_for(lambda: service.look() or service.lines, limit_s=30)
    service.close()
    assert service.lines == [
        "NCCL: communicator 0xabc of 2 ranks: rank 1 (node5, GPU 1, pid 101) is 1 AllReduce behind, and nothing moves"
    ]
    program.write_text("#!/bin/sh\nexec sleep 1000\n")
    for path in (os.environ["PATH"], "/nowhere"):
        monkeypatch.setenv("PATH", path)
        silent = NcclService()
        silent.look()
        silent.look()
        silent.close()
        assert silent.lines == []


ALONE = """
import os, subprocess, sys
import torch, torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
"""
JOB = """
import os, sys
import torch, torch.distributed as dist, torch.multiprocessing as mp

def train(rank, raises):
    dist.init_process_group("gloo", rank=rank, world_size=2)
    dist.all_reduce(torch.ones(1))
    if raises and rank == 1:
        raise ValueError("planted")
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.start_processes(train, (len(sys.argv) > 2,), nprocs=2, start_method=sys.argv[1])
"""


def start_script(folder: Path, source: str, *arguments: str, rank: int | None = 0, size: int = 1, port: int = 0, run: str = "run"
          ) -> subprocess.Popen[str]:  # fmt: skip
    """Start a script with the variables of a launcher, unless ``rank`` is None."""
    (folder / "script.py").write_text(source)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port or free_port())}
    launched = {} if rank is None else {"RANK": str(rank), "WORLD_SIZE": str(size)}
    return subprocess.Popen(
        [sys.executable, str(folder / "script.py"), *arguments], cwd=folder, stderr=subprocess.PIPE, text=True,
        env={**os.environ, **place, **launched, "NSA_TRACE_DIR": str(folder / run)},
    )  # fmt: skip


def verdict_of(folder: Path, run: str = "run") -> Verdict:
    return diagnose(load(folder / run))


@pytest.mark.parametrize(
    ("source", "arguments", "found"),
    [
        (f"{ALONE}sys.exit(3)", (), ("FAIL", "rank_exited", (0,))),
        (f"{ALONE}os._exit(7)", (), ("FAIL", "rank_exited", (0,))),
        (f"{ALONE}os._exit(0)", (), ("PASS", "", ())),
        (f"{ALONE}try:\n    sys.exit(3)\nexcept SystemExit:\n    dist.all_reduce(torch.ones(1))", (), ("PASS", "", ())),
        (JOB, ("fork",), ("PASS", "", ())),
        (JOB, ("spawn", "raises"), ("FAIL", "rank_exception", (1,))),
        pytest.param(JOB, ("fork", "raises"), ("FAIL", "rank_exception", (1,)), marks=pytest.mark.slow),
        pytest.param(JOB, ("spawn",), ("PASS", "", ()), marks=pytest.mark.slow),
        pytest.param(JOB, ("forkserver", "raises"), ("FAIL", "rank_exception", (1,)), marks=pytest.mark.slow),
    ],
)
def test_how_a_script_and_its_children_end_is_known(
    tmp_path: Path, source: str, arguments: tuple[str, ...], found: tuple[str, str, tuple[int, ...]]
) -> None:
    start_script(tmp_path, source, *arguments, rank=0 if source is not JOB else None).communicate(timeout=100)
    verdict = verdict_of(tmp_path)
    assert (verdict.outcome, verdict.cause, verdict.ranks) == found
    assert verdict.cause != "rank_exited" or verdict.where.endswith("script.py:7 in <module>")


def test_a_rank_that_was_killed_is_named_where_the_launcher_ended_the_other(tmp_path: Path) -> None:
    source = f"{ALONE}dist.barrier()\nif dist.get_rank() == 1:\n    os.kill(os.getpid(), 9)\nos.read(os.pipe()[0], 1)\n"
    port = free_port()
    ranks = [start_script(tmp_path, source, rank=rank, size=2, port=port) for rank in (0, 1)]
    ranks[1].wait(100)
    ranks[0].terminate()
    assert ranks[0].wait(100) == -signal.SIGTERM
    for process in ranks:
        process.communicate()
    verdict = verdict_of(tmp_path)
    assert (verdict.outcome, verdict.cause, verdict.ranks) == ("CRASH", "rank_died", (1,))


def test_a_job_that_a_rank_starts_leaves_its_evidence_alone(tmp_path: Path) -> None:
    inner = f"""
if len(sys.argv) == 1:
    subprocess.run([sys.executable, __file__, "inner"], env={{**os.environ, "MASTER_PORT": "{free_port()}"}}, check=True)
    raise ValueError("planted")
"""
    process = start_script(tmp_path, ALONE + inner)
    _, errors = process.communicate(timeout=100)
    assert f"process {process.pid} leaves its evidence there" in errors
    verdict = verdict_of(tmp_path)
    assert verdict.failed
    assert "ValueError: planted" in verdict.reason


def test_a_folder_that_cannot_be_made_costs_the_evidence_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    # Without it, torch itself may abort at exit: a thread of its group still runs.
    process = start_script(tmp_path, f"{ALONE}dist.destroy_process_group()\n", run="file/run")
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert "nsa: rank 0 leaves no evidence: " in errors
