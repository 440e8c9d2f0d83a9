"""ranks_descendants: a healthy test does not notice that its processes are followed, whatever it replaces or compares."""

from __future__ import annotations

import pytest

ENVIRONMENT = """
import multiprocessing, os, subprocess, sys, threading
AT_IMPORT = dict(os.environ)

def test_environment():
    subprocess.run(["true"], check=True)
    assert {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"} == {
        k: v for k, v in AT_IMPORT.items() if k != "PYTEST_CURRENT_TEST"}

def test_children_get_the_variables_unless_their_environment_is_another():
    command = [sys.executable, "-c", "import os; print('NSA_TRACE_JOBS' in os.environ)"]
    run = lambda **how: subprocess.run(command, capture_output=True, text=True, check=True, **how).stdout.strip()
    assert run() == "True"
    assert run(env={**os.environ, "MORE": "1"}) == "True"
    assert run(env={"RANK": "0"}) == "True"
    assert run(env={"ONLY": "1"}) == "False"
    os.putenv("OF_C", "1")  # os.environ does not have it
    assert subprocess.run(["printenv", "OF_C"], check=True, capture_output=True).stdout == b"1\\n"

def test_threads_copy_the_environment():
    errors, is_over = [], threading.Event()
    def copy():
        while not is_over.is_set():
            try:
                dict(os.environ)
            except KeyError as error:
                errors.append(error)
    threads = [threading.Thread(target=copy) for _ in range(2)]
    [thread.start() for thread in threads]
    for _ in range(10):
        child = multiprocessing.get_context("fork").Process(target=abs, args=(1,))
        child.start()
        child.join()
    is_over.set()
    [thread.join() for thread in threads]
    assert errors == []
"""
HANDLERS = """
import asyncio, os, signal, subprocess, sys, time
import pytest

def test_own_handler():
    mine = lambda number, frame: None
    before = signal.signal(signal.SIGINT, mine)
    try:
        subprocess.run(["true"], check=True)
        assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, before)

def test_asyncio_starts_a_child():
    async def child():
        process = await asyncio.create_subprocess_exec("true")
        assert await process.wait() == 0
    asyncio.run(child())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

def test_catches_an_interrupt_and_goes_on_with_its_child():
    code = "import sys; sys.stdin.read(1); sys.exit(7)"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(3.5)  # longer than a test that is ended has for its cleanup
    child.communicate(b"x")
    assert child.returncode == 7
"""
REPLACED = """
import os, subprocess, sys, types
from unittest import mock
import pytest

NAMES = ["os.listdir", "os.open", "os.replace", "os.waitpid", "time.sleep", "json.dumps", "pathlib.Path.open"]

@pytest.mark.parametrize("name", NAMES)
def test_replaced_function(name):
    child = subprocess.Popen(["true"]) if name == "os.waitpid" else None
    with mock.patch(name, side_effect=AssertionError(name)):
        subprocess.Popen(["true"]) if child else subprocess.run(["true"], check=True)

@pytest.fixture(scope="class")
def no_files():
    with mock.patch("os.listdir", side_effect=OSError("none")), mock.patch("time.sleep", side_effect=OSError("none")):
        yield

@pytest.mark.usefixtures("no_files")
class TestReplacedForAClass:
    def test_one(self): subprocess.run(["true"], check=True)
    def test_two(self): subprocess.Popen(["cat"], stdin=subprocess.PIPE)

@pytest.mark.parametrize("torch", [None, types.ModuleType("torch")])
def test_hidden_torch(monkeypatch, torch):
    monkeypatch.setitem(sys.modules, "torch", torch)
    subprocess.run(["true"], check=True)
"""


@pytest.mark.parametrize(("source", "passed"), [(ENVIRONMENT, 3), (HANDLERS, 3), (REPLACED, 11)])
def test_a_healthy_test_does_not_notice(pytester: pytest.Pytester, source: str, passed: int) -> None:
    pytester.makepyfile(test_it=source)
    done = pytester.runpytest_subprocess("--ranks-descendants=report", "-p", "no:randomly", timeout=120)
    warnings = done.parseoutcomes().get("warnings", 0)  # Python's own, of forks in a process with threads
    done.assert_outcomes(passed=passed, warnings=warnings)
    if source is not REPLACED:
        done.stdout.no_fnmatch_line("*not followed to its end*")


def test_what_cannot_be_followed_is_reported_and_the_failure_stays(pytester: pytest.Pytester) -> None:
    source = """
    import subprocess

    def test_fails(monkeypatch):
        subprocess.run(["true"], check=True)
        monkeypatch.setattr("pytest_nsa.system.descendants.listdir", lambda path: 1 / 0)
        assert 1 == 2

    def test_after(): pass
    """
    pytester.makepyfile(test_it=source)
    done = pytester.runpytest_subprocess("--ranks-descendants=report", "-p", "no:randomly", timeout=120)
    done.assert_outcomes(passed=1, failed=1, warnings=1)
    done.stdout.fnmatch_lines(["*nsa: the processes of this test were not followed to its end: ZeroDivisionError:*"])
    done.stdout.fnmatch_lines(["FAILED *assert 1 == 2"])


SHARED = """
import multiprocessing, os, subprocess, threading
from concurrent.futures import ProcessPoolExecutor
import pytest

fork = multiprocessing.get_context("fork")

@pytest.fixture(scope="session")
def executor():
    with ProcessPoolExecutor(2, mp_context=fork) as found:
        yield found

@pytest.fixture(scope="module")
def pool():
    with fork.Pool(2, maxtasksperchild=1) as found:
        yield found

@pytest.fixture(scope="module")
def server():  # neither subprocess nor multiprocessing
    pid = os.posix_spawnp("sleep", ["sleep", "600"], dict(os.environ))
    yield pid
    os.kill(pid, 9)
    os.waitpid(pid, 0)

@pytest.mark.timeout(5)
def test_hangs_by_itself(executor, pool, server):
    assert executor.submit(abs, -1).result() == 1
    assert pool.map(abs, [-1, -2]) == [1, 2]
    threading.Event().wait()

def test_goes_on(executor, pool, server):
    assert executor.submit(abs, -1).result() == 1
    assert pool.map(abs, [-1, -2]) == [1, 2]
    assert os.waitpid(server, os.WNOHANG) == (0, 0)
"""


def test_processes_of_a_fixture_that_start_during_a_test_are_not_ended(pytester: pytest.Pytester) -> None:
    """An executor starts its workers with its first task, a pool replaces those that have done their tasks."""
    pytester.makepyfile(test_it=SHARED)
    done = pytester.runpytest_subprocess("--ranks-descendants=report", "-p", "no:randomly", timeout=120)
    done.assert_outcomes(passed=1, failed=1)
