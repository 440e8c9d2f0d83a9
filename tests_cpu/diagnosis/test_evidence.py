"""Evidence as killed writers leave it is read as far as it goes."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from nsa.trace.board import Board
from nsa.trace.frames import is_user_file
from pytest_nsa.cli.main import main
from pytest_nsa.diagnosis.engine import diagnose
from pytest_nsa.evidence.load import abort_message, fatal_signal, innermost_symbol, load
from pytest_nsa.evidence.stacks import Frame, parse_dump, thread_that_shows
from pytest_nsa.evidence.waiting import computes, share_of_main
from pytest_nsa.system.gpu import look_at_gpus
from pytest_nsa.testing import run_example
from pytest_nsa.wire.messages import Job

DUMP = """\
Thread 0x00007f02 (most recent call first):
  File "/x/nsa/trace/stall/heartbeat.py", line 62 in _run
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Thread 0x00007f03 (most recent call first):
  File "/home/me/model.py", line 12 in backward
  File "/usr/lib/python3.11/site-packages/torch/autograd/function.py", line 325 in apply

Current thread 0x00007f01 [python] (most recent call first):
  File "/usr/lib/python3.11/site-packages/torch/autograd/graph.py", line 9 in _engine_run_backward
  File "/home/me/train.py", line 40 in step
  File "/home/me/test_it.py", line 3 in test_it
  File "/usr/lib/python3.11/site-packages/_pytest/python.py", line 187 in pytest_pyfunc_call
"""


def make_folder(path: Path, world_size: int = 2, events: Iterable[Mapping[str, object]] = ()) -> Path:
    """Make the folder of a test, with ``events`` of its host."""
    job = Job(nodeid="t.py::t", folder=str(path), world_size=world_size, backend="gloo", root="/home/me")
    path.mkdir()
    (path / "job.json").write_text(json.dumps(job.to_json()))
    for rank in range(world_size):
        (path / f"rank{rank}").mkdir()
    (path / "host.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


STOP = {"event": "stop", "time": 100.0, "reason": "deadline", "stalled_s": 5.0, "moved": False}


@pytest.mark.parametrize(("state", "share"), [("R", 0.5), ("S", 0.05)])
def test_a_rank_computes_by_all_its_samples_if_it_still_wants_the_cpu(tmp_path: Path, state: str, share: float) -> None:
    """On a busy machine, other processes had the CPU in the last, short interval."""
    facts = {"event": "process", "rank": 0, "state": state, "wants_cpu": state == "R", "wchan": "0", "cpu_share": 0.0}
    samples = [(0.0, 1.0, 0.9), (30.0, 16.0, 0.6), (38.0, 20.0, 0.5), (38.2, 20.01, 0.05)]
    lines = [{**facts, "time": time, "main_cpu_s": used, "main_cpu_share": now} for time, used, now in samples]
    (rank,) = load(make_folder(tmp_path / "t", 1, lines)).ranks
    assert share_of_main(rank.process) == pytest.approx(share, abs=0.02)
    assert computes(rank.process) == (state == "R")


def test_a_rank_that_is_idle_in_a_backward_is_not_the_one_that_is_missing(tmp_path: Path) -> None:
    """It may wait in a reduction that nothing recorded, as a hook of C++ makes it."""
    idle = {"state": "S", "cpu_share": 0.0, "wchan": "futex_do_wait"}
    lines = [{"event": "stop", "time": 9.0, "reason": "deadline", "stalled_s": 4.0}]
    lines += [{"event": "process", "time": 9.0, "rank": rank, **idle} for rank in range(3)]
    lines += [{"event": "exit", "time": 9.1, "rank": rank, "code": 0, "signal": 9, "by_us": True} for rank in range(3)]
    folder = make_folder(tmp_path / "t", 3, lines)
    board = Board(folder / "rank2" / "board.bin", rank=2, world_size=3)
    index = board.enter("barrier", "0", 1, "", 0, "/home/me/train.py:50 in main", size=3)
    board.number("blocked_in", index + 1)
    for rank in (0, 1):
        (folder / f"rank{rank}" / "stacks.txt").write_text(
            DUMP.replace('  File "/home/me/model.py", line 12 in backward\n', "")
        )
    verdict = diagnose(load(folder))
    assert verdict.cause != "missing_collective"


@pytest.mark.parametrize(("looks", "expected"), [(200, ("HANG", "sleeping", (1,))), (5, ("CRASH", "rank_died", (1,)))])
def test_a_signal_that_ends_a_stall_of_a_training_is_not_its_cause(
    tmp_path: Path, looks: int, expected: tuple[str, str, tuple[int, ...]]
) -> None:
    """No process watched it: the signal is in the dump of faulthandler, and the stall in what the heartbeats saw."""
    folder = make_folder(tmp_path / "t")
    for rank, beat in ((0, 10.0), (1, 9.9)):
        board = Board(folder / f"rank{rank}" / "board.bin", rank=rank, world_size=2)
        board.number("still_looks", looks)
        board.number("beat_time", beat)
        if rank == 0:
            index = board.enter("allreduce", "0", 1, "float32", 4, "/home/me/train.py:12 in main", size=2)
            board.number("blocked_in", index + 1)
    dump = 'Current thread 0x1 (most recent call first):\n  File "/home/me/train.py", line 9 in main\n'
    (folder / "rank0" / "terminated.txt").write_text(dump)
    (folder / "rank1" / "fatal.txt").write_text(f"Fatal Python error: Aborted\n\n{dump}")
    kept = {"file": "/home/me/train.py", "first": 8, "text": "def main():\n    time.sleep(1000)\n"}
    (folder / "source.jsonl").write_text(json.dumps(kept) + "\n")
    evidence = load(folder)
    assert [rank.signal for rank in evidence.ranks] == [0, 6]
    verdict = diagnose(evidence)
    assert (verdict.outcome, verdict.cause, verdict.ranks) == expected


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ("Fatal Python error: Aborted", 6), ("Fatal Python error: Segmentation fault", 11), ("Fatal Python error: Bus error", 7),
        ("Fatal Python error: Floating-point exception", 8), ("Fatal Python error: something else", 0), ("", 0),
    ],
)  # fmt: skip
def test_the_signal_in_a_dump_of_a_fatal_error(line: str, number: int) -> None:
    assert fatal_signal(f"{line}\n\nThread 0x1 (most recent call first):\n") == number


def test_the_thread_that_runs_backward_is_shown(tmp_path: Path) -> None:
    threads = parse_dump(DUMP)
    assert [t.is_ours for t in threads] == [True, False, False]
    telling = thread_that_shows(threads)
    assert telling is not None
    assert telling.user_frame is not None
    assert telling.user_frame.describe() == "/home/me/model.py:12 in backward"
    assert [f.function for f in threads[2].test_frames] == ["_engine_run_backward", "step", "test_it"]


def test_diagnose_without_evidence_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(tmp_path)]) == 2
    assert "no evidence here" in capsys.readouterr().err


def test_diagnose_of_a_run_in_which_all_passed_is_no_error(
    pytester: pytest.Pytester, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_example(pytester, "@world_size(1)\ndef test_a(group): pass").run
    assert run is not None
    assert main(["diagnose", str(run), "--json"]) == 2
    assert main(["diagnose", str(run)]) == 0
    assert "no test failed; of tests that pass, --ranks-keep=all keeps the evidence" in capsys.readouterr().err


def test_diagnose_reads_a_moved_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    moved = make_folder(tmp_path / "t").rename(tmp_path / "elsewhere")
    assert main(["diagnose", str(moved), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["cause"] == "unknown"


def test_gpus_are_read_by_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, 97, 1024, 81920, 55, P0'\necho 'a warning'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert [(gpu["index"], gpu["utilization.gpu"]) for gpu in look_at_gpus()] == [("0", "97")]


def test_the_innermost_native_symbol_is_the_main_thread_s() -> None:
    text = (
        'Thread 8 (idle): "nsa-heartbeat"\n    poll (libc.so.6)\n'
        'Thread 7 (active): "MainThread"\n    at::native::add (libtorch_cpu.so)\n    forward (model.py:3)\n'
    )
    assert innermost_symbol(text) == "at::native::add in libtorch_cpu.so"
    assert innermost_symbol('Thread 7 (active): "MainThread"\n    forward (model.py:3)\n') == ""


WATCHDOG = """\
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated with exception: [Rank 1] Watchdog \
caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, Timeout(ms)=10000) ran for 10006 milliseconds
"""


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (
            "a line\nterminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  4000 vs 4. \nmore\n",
            "gloo::EnforceNotMet: 4000 vs 4.",
        ),
        ("terminate called after throwing an instance of 'int'\n", "int"),
        ("libc++abi: terminating due to uncaught exception of type std::bad_alloc: why\n", "std::bad_alloc: why"),
        (
            "python: x.c:3: int f(int): Assertion `n > 0' failed.\n",
            "python: x.c:3: int f(int): Assertion `n > 0' failed.",
        ),
        ("assert n > 0\nAssertionError: it said 'terminate called after'\n", ""),
    ],
)
def test_the_message_of_an_abort(output: str, message: str) -> None:
    assert abort_message(output) == message


def test_a_rank_that_a_backend_aborted_for_its_wait_did_not_die_first(tmp_path: Path) -> None:
    """NCCL's watchdog aborts rank 1, which waited for rank 0, before the kernel's signal ends that one."""
    exits = [{"event": "exit", "time": 6.0, "rank": 1, "code": 0, "signal": 6, "by_us": False}]
    exits.append({"event": "ended", "time": 9.0, "duration_s": 4.0})
    folder = make_folder(tmp_path / "t", events=exits)
    (folder / "rank1" / "output.log").write_text(WATCHDOG)
    alone = diagnose(load(folder))
    assert (alone.ranks, alone.certain) == ((1,), False)
    assert "Watchdog caught collective operation timeout" in alone.explanation
    with (folder / "host.jsonl").open("a") as host:
        host.write(json.dumps({**exits[0], "time": 7.0, "rank": 0, "signal": 11}) + "\n")
    both = diagnose(load(folder))
    assert (both.cause, both.ranks, both.certain) == ("rank_died", (0,), True)


@pytest.mark.parametrize(
    ("file", "is_user"),
    [
        ("/cache/dp/cdpylwfpvbwisca6y56bb35maq57joe5ezbllccri67bj3jfv7p2.py", False),
        ("/home/me/dp/cdpyl.py", True),
        ("/home/me/train.py", True),
    ],
)
def test_what_a_compiler_wrote_is_not_the_user_s_line(file: str, is_user: bool) -> None:
    assert Frame(file, 1, "call").is_user is is_user
    assert is_user_file(file) is is_user


def test_a_dump_that_was_cut_off_before_the_main_thread_is_replaced_by_the_rank_s_own(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "t", events=[STOP])
    at = 'File "/repo/nsa/trace/stall/heartbeat.py", line 185 in _place_of'
    beat = f"Thread 0x0000000000000002 (most recent call first):\n  {at}\n"
    main = 'Current thread 0x0000000000000001 (most recent call first):\n  File "/home/me/t.py", line 9 in wait\n'
    (folder / "rank1" / "stacks.txt").write_text(beat)
    (folder / "rank1" / "stall.json").write_text(json.dumps({"time": 99.0, "stacks": beat + "\n" + main}))
    stack = load(folder).ranks[1].stack
    assert stack is not None
    assert stack.frames[0].describe() == "/home/me/t.py:9 in wait"


@pytest.mark.parametrize("handles", [7, {"says": 7, "at": "", "in": ""}, {"says": "KeyError: x"}, ["x"]])
def test_what_a_stranger_wrote_of_an_exception_is_passed_over(tmp_path: Path, handles: object) -> None:
    folder = make_folder(tmp_path / "t", events=[STOP])
    (folder / "rank1" / "stall.json").write_text(json.dumps({"time": 99.0, "handles": handles, "asyncio": {}}))
    assert load(folder).ranks[1].handles is None
