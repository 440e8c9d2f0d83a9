"""A rank that waits for processes that it started: the report says whether they have failed, compute or rest."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import threading

import pytest

from pytest_nsa.system.procfs import children_of, look_at
from pytest_nsa.testing import run_example


def test_children_of_all_threads_are_listed() -> None:
    process = subprocess.Popen(["sleep", "100"])
    started: list[subprocess.Popen[bytes]] = []
    begun, ended = threading.Event(), threading.Event()

    def start() -> None:
        started.append(subprocess.Popen(["sleep", "100"]))
        begun.set()
        ended.wait()

    thread = threading.Thread(target=start)
    thread.start()
    begun.wait()
    try:
        assert {process.pid, started[0].pid} <= set(children_of(os.getpid()))
    finally:
        ended.set()
        thread.join()
        for child in (process, *started):
            child.kill()
            child.wait()


@pytest.mark.parametrize(("end", "shown"), [("os._exit(3)", "exit code 3"), ("os.abort()", "signal 6")])
def test_how_a_child_ended_that_was_not_waited_for(end: str, shown: str) -> None:
    child = multiprocessing.get_context("fork").Process(target=eval, args=(end, {"os": os}))
    child.start()
    with contextlib.closing(child):
        os.waitid(os.P_PID, child.pid or 0, os.WEXITED | os.WNOWAIT)
        state = look_at(os.getpid())
        child.join()
    assert state is not None
    assert shown in state.ended
    assert shown not in state.children
    after = look_at(os.getpid())
    assert after is not None
    assert shown not in after.ended


def test_an_unmarked_test_s_child_that_failed_is_named(pytester: pytest.Pytester) -> None:
    source = """
    import multiprocessing

    def fail(answers):
        raise ValueError("no such file")

    @pytest.mark.timeout(2)
    def test_an_answer():
        context = multiprocessing.get_context("fork")
        answers = context.Queue()
        context.Process(target=fail, args=(answers,)).start()
        answers.get()
    """
    result = run_example(pytester, source, "--ranks-descendants=report")
    assert result.outcomes["failed"] == 1  # from Python 3.12 on with a warning of its fork
    assert "has failed (exit code 1), and was not waited for" in result.stdout
    assert "waits    the test, at test_example.py:" in result.stdout


UNNOTICED = """
import multiprocessing, subprocess
context = multiprocessing.get_context("fork")

def worker(rank, store, raises):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    dist.barrier()
    assert not (raises and rank == 1), "the real failure"

@pytest.mark.parametrize("raises", [True, False])
def test_joins(tmp_path, raises):
    children = [context.Process(target=worker, args=(r, str(tmp_path / "s"), raises)) for r in range(2)]
    [c.start() for c in children]
    [c.join() for c in children]

PROGRAM = '''
import sys, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
dist.barrier()
if sys.argv[2] == "0":
    {}["no key"]
'''

def test_runs_a_program(tmp_path):
    started = [subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path / "s"), str(r)]) for r in range(2)]
    [p.wait() for p in started]
"""


@pytest.mark.parametrize("fails", ["true", "false"])
def test_a_rank_that_raised_in_a_test_that_passed_is_reported(pytester: pytest.Pytester, fails: str) -> None:
    pytester.makeini(f"[pytest]\nranks_descendants = report\nranks_descendants_fail = {fails}\n")
    result = run_example(pytester, UNNOTICED)
    assert "rank 1 of 2 raised AssertionError: the real failure at" in result.stdout
    assert "rank 0 of 2 raised KeyError: 'no key' at" in result.stdout
    if fails == "true":
        assert result.outcomes == {"failed": 2, "passed": 1}
    else:
        assert result.outcomes == {"passed": 3, "warnings": 2}
