"""ranks_descendants: tests on no ranks that start processes by themselves, at their limit, at Ctrl-C, at the session's end.

One that is healthy does not notice that its processes are followed, whatever it replaces or compares.
"""

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from pytest_nsa.diagnosis.verdict import Verdict
from pytest_nsa.testing import run_example
from tests_cpu.plugin.sessions import find_line, no_process_is_left, read_verdicts
from tests_cpu.sockets import free_port
from tests_cpu.warm import WarmPython

# Each child says that it is in place; then the test's time limit comes, whatever time the machine took until there.
COMMON = """
import os, signal, subprocess, sys, time
from pathlib import Path

def here(name):
    Path(name).touch()

def at_limit(*names):
    while not all(map(os.path.exists, names)):
        time.sleep(0.02)
    signal.setitimer(signal.ITIMER_REAL, 2)
"""
WORKERS = """
import torch, torch.distributed as dist

def worker(rank, world, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    for step in range(3):
        if step == 2:
            here(f"rank{rank}")
        if not (step == 2 and rank == 1):
            dist.all_reduce(torch.ones(4))  # HERE
        dist.barrier()
"""
SPAWN = """
from common import *
from workers import worker
import torch.multiprocessing as mp

def test_spawns():
    context = mp.spawn(worker, args=(2, int(os.environ["PORT"])), nprocs=2, join=False)
    at_limit("rank0", "rank1")
    while not context.join():
        pass

def test_after():
    assert "NSA_TRACE_HOST" not in os.environ
"""
RAISES = """
from common import *

def test_runs_torchrun():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "raises.py"]
    done = subprocess.run(command, capture_output=True)
    assert done.returncode == 0
"""
RAISES_SCRIPT = """
import atexit, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
out = torch.ones(3)
if dist.get_rank() == 1:
    atexit.register(time.sleep, 1)
    atexit.register(dist.destroy_process_group)  # rank 0 raises, too, before torchrun sees that this one has ended
    assert out.sum().item() == 4.0, "beyond tolerance"  # HERE
dist.barrier()
"""
EXIT = """
from common import *
from workers import worker
import torch.multiprocessing as mp

def test_passes():
    mp.spawn(worker, args=(2, int(os.environ["PORT"])), nprocs=2, join=False)
    while not os.path.exists("rank1"):
        time.sleep(0.02)
"""
AFTER = """
def test_after():
    subprocess.run(["true"], check=True)  # its end calls the handler of SIGCHLD
"""


LOADER = """
from common import *
import torch

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 3:
            here("sample")
            os.read(os.pipe()[0], 1)
        return index

def test_it():
    batches = iter(torch.utils.data.DataLoader(Samples(), num_workers=2))
    at_limit("sample")
    list(batches)

def test_after():
    subprocess.run(["true"], check=True)  # its end calls the loader's handler of SIGCHLD, which raises for a killed worker
"""
SPAWNED = """
from common import *
import threading, torch.multiprocessing as mp

def outer(first, second, name):
    with first:
        here(name)
        while not all(map(os.path.exists, ("one", "two"))):
            time.sleep(0.02)
        inner(second)

def inner(lock):
    with lock:
        pass

def work(index):
    one, two = threading.Lock(), threading.Lock()
    threading.Thread(target=outer, args=(one, two, "one")).start()
    outer(two, one, "two")

def test_it():
    context = mp.spawn(work, nprocs=1, join=False)
    at_limit("one", "two")
    context.join()
"""
MANAGER = """
import multiprocessing

def test_keeps_a_manager():
    global manager
    manager = multiprocessing.Manager()
"""
# Its handler of atexit ends the child, and would wait for ever for one that was killed while it waits for the event.
AT_EXIT = """
import atexit
import multiprocessing

def wait(event):
    event.wait()

def test_leaves_a_child():
    event = multiprocessing.Event()
    child = multiprocessing.Process(target=wait, args=(event,))
    child.start()
    atexit.register(child.join)
    atexit.register(event.set)
"""
THREAD = """
import queue, threading, time

def waits(items):
    items.get()

def polls(items):
    while not items:
        time.sleep(0.1)

def computes(items):
    end = time.monotonic() + 5
    while time.monotonic() < end:
        sum(range(1000))

def test_leaves_a_thread():
    threading.Thread(target=FAULT, args=(queue.Queue() if "FAULT" != "polls" else (),)).start()
"""
HANDLES = """
import signal
import subprocess

def test_counts_its_children():
    ended = []
    signal.signal(signal.SIGCHLD, lambda number, frame: ended.append(number))
    assert subprocess.run(["true"]).returncode == 0
    assert len(ended) == 1

def test_ignores_its_children():
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    subprocess.run(["true"])
"""
UNTOUCHED = """
import os, subprocess

def test_it():
    assert not {n for n in os.environ if n.startswith("NSA_TRACE")}
    assert subprocess.Popen._execute_child.__module__ == "subprocess"
"""
HANDLER_RAISES = """
import signal
import subprocess
import time

def test_waits_for_a_child():
    def has_ended(number, frame):
        raise RuntimeError("a worker exited unexpectedly")

    signal.signal(signal.SIGCHLD, has_ended)
    child = subprocess.Popen(["sleep", "1000"])
    while True:
        time.sleep(0.1)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "common.py").write_text(COMMON)
    (tmp_path / "workers.py").write_text("from common import here\n" + WORKERS)
    (tmp_path / "raises.py").write_text(RAISES_SCRIPT)
    return tmp_path


def command(*arguments: str) -> list[str]:
    plugins = ["-p", "no:cacheprovider", "-p", "no:randomly"]
    return [
        sys.executable, "-m", "pytest", "-q", *plugins, "--timeout=600", "--ranks-descendants=report",
        "--ranks-artifacts=artifacts", "--junitxml=junit.xml", *arguments,
    ]  # fmt: skip


def environment() -> dict[str, str]:
    mine = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "NSA_", "RANK", "WORLD_SIZE"))}
    return {**mine, "PORT": str(free_port()), "PYTHONPATH": os.getcwd()}


def run(warm: WarmPython, folder: Path, source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(source)
    line = command(*arguments)[1:]
    return warm.call(*line, cwd=folder, env=environment(), stderr=subprocess.STDOUT, timeout=170, nursery=True)


def run_cold(folder: Path, source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in an interpreter that ends by the handlers of atexit, and has its own environment in /proc."""
    (folder / "test_it.py").write_text(source)
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.run(command(*arguments), cwd=folder, env=environment(), check=False, timeout=170, **output)


def blamed(folder: Path) -> Verdict:
    (found,) = read_verdicts(folder).values()
    return found


def run_here(pytester: pytest.Pytester, source: str, *options: str) -> pytest.RunResult:
    pytester.makepyfile(test_it=source)
    return pytester.runpytest_subprocess("--ranks-descendants=report", *options, timeout=120)


def test_a_test_at_its_limit_names_the_rank_and_ends_its_processes(warm: WarmPython, folder: Path) -> None:
    done = run(warm, folder, SPAWN)
    found = blamed(folder)
    assert (found.cause, found.ranks) == ("skipped_collective", (1,)), done.stdout
    assert f"workers.py:{find_line(WORKERS, 'HERE') + 1} in worker" in found.where
    assert " - HANG: rank 1 of 2" in next(line for line in done.stdout.splitlines() if line.startswith("FAILED"))
    assert "1 failed" in done.stdout
    no_process_is_left(folder)
    failure = ET.parse(folder / "junit.xml").find(".//failure")
    assert failure.get("message", "").startswith("HANG: rank 1 of 2, skipped_collective")
    assert "from pytest-timeout" in (failure.text or ""), "what pytest-timeout says stays below the verdict"
    assert ET.parse(folder / "junit.xml").find(".//property[@name='nsa.verdict']") is not None


def test_the_failure_of_a_test_has_the_exception_of_the_rank_that_it_ran(warm: WarmPython, folder: Path) -> None:
    (folder / "raises.py").write_text(RAISES_SCRIPT.replace("beyond tolerance", "beyond tolerance token=urltoken55"))
    done = run(warm, folder, RAISES, "-o", "ranks_mask_output=true")
    failure = ET.parse(folder / "junit.xml").find(".//failure")
    assert failure.get("message", "").startswith("FAIL: rank 1 of 2, rank_exception"), done.stdout
    for text in ("beyond tolerance", f"raises.py:{find_line(RAISES_SCRIPT, 'HERE')}", "assert done.returncode == 0"):
        assert text in (failure.text or "")
    latest = folder / "artifacts" / "latest"
    assert [path for path in latest.rglob("*") if path.is_file() and b"urltoken55" in path.read_bytes()] == []
    assert (latest / "SUMMARY.md").read_text().splitlines()[0].endswith("1 of 1 test fails.")


@pytest.mark.parametrize(
    ("source", "place"),
    [
        pytest.param(LOADER, f"test_it.py:{find_line(LOADER, 'os.read')} in __getitem__", id="a loader's workers"),
        pytest.param(
            SPAWNED, f"test_it.py:{find_line(SPAWNED, 'with lock')} in inner", id="threads of a spawned child"
        ),
    ],
)
def test_processes_that_are_no_ranks_show_their_lines_and_block_no_session(
    warm: WarmPython, folder: Path, source: str, place: str
) -> None:
    done = run(warm, folder, source + AFTER)
    assert "1 failed, 1 passed" in done.stdout, done.stdout
    assert "from pytest-timeout" in next(line for line in done.stdout.splitlines() if line.startswith("FAILED"))
    assert "in test_it" in next(line for line in done.stdout.splitlines() if line.startswith("  waits "))
    assert any(f": at {place}" in line for line in done.stdout.splitlines() if line.startswith("  process ")), (
        done.stdout
    )
    assert "DataLoader worker" not in done.stdout


@pytest.mark.parametrize(
    ("ini", "code"), [pytest.param("false", 0, marks=pytest.mark.slow), ("true", pytest.ExitCode.TESTS_FAILED)]
)
def test_processes_that_keep_a_session_from_ending_are_named_and_ended(folder: Path, ini: str, code: int) -> None:
    done = run_cold(folder, EXIT, "-o", f"ranks_left_fails={ini}")
    assert done.returncode == code, done.stdout
    assert "1 passed" in done.stdout
    named, _, ended = done.stdout.partition(
        "would keep this session from ending, left by test_it.py::test_passes; ended"
    )
    assert "nsa: after the last test: skipped_collective on rank 1 at workers.py" in named
    assert "HANG: rank 1 of 2" in ended
    assert blamed(folder).ranks == (1,)
    assert "rank 1" in (folder / "artifacts" / "latest" / "SUMMARY.md").read_text()
    no_process_is_left(folder)


@pytest.mark.parametrize(("source", "fails"), [(MANAGER, "true"), (AT_EXIT, "false")])
def test_what_ends_at_exit_keeps_no_session_from_ending(folder: Path, source: str, fails: str) -> None:
    done = run_cold(folder, source, "-o", f"ranks_left_fails={fails}")
    assert done.returncode == 0, done.stdout
    assert "keep this session from ending" not in done.stdout


@pytest.mark.parametrize(("fault", "line"), [("waits", "get"), ("polls", "sleep"), ("computes", "")])
def test_a_thread_that_keeps_a_session_from_ending_is_named_unless_it_computes(
    folder: Path, fault: str, line: str
) -> None:
    (folder / "test_it.py").write_text(THREAD.replace("FAULT", fault))
    output = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command(), cwd=folder, env=environment(), **output) as session:
        shown = next((line for line in session.stderr if "the session is over" in line), "")
        session.kill()
    assert shown.rstrip().endswith(f"test_it.py:{find_line(THREAD, line)} in {fault}") == bool(line)
    assert session.returncode == (-9 if line else 0)


def test_ctrl_c_reports_and_ends(warm: WarmPython, folder: Path) -> None:
    interrupts = "import threading; threading.Timer(4, os.kill, (os.getpid(), signal.SIGINT)).start()"
    done = run(warm, folder, SPAWN.replace("    at_limit(", f"    {interrupts}\n    0 and at_limit("))
    assert done.returncode == pytest.ExitCode.INTERRUPTED
    assert "interrupted; until then" in done.stdout
    assert blamed(folder).ranks == (1,), done.stdout
    no_process_is_left(folder)


def test_a_handler_of_the_program_does_not_take_the_place_of_the_time_limit(pytester: pytest.Pytester) -> None:
    shown = run_here(pytester, HANDLER_RAISES, "--timeout=3").stdout.str()
    assert "Failed: Timeout" in shown
    assert "sleep 1000" in shown  # the processes of the test are named
    assert "exited unexpectedly" not in shown.partition("short test summary")[2]


def test_a_handler_of_the_program_is_called_for_its_own_children_alone(pytester: pytest.Pytester) -> None:
    run_here(pytester, HANDLES).assert_outcomes(passed=2)
    run_here(pytester, HANDLES.replace("test_counts", "count"), "--timeout=60").assert_outcomes(passed=1)


def test_off_is_the_default_and_changes_nothing(warm: WarmPython, folder: Path) -> None:
    (folder / "test_it.py").write_text(UNTOUCHED)
    line = [part for part in command()[1:] if not part.startswith("--ranks-descendants")]
    assert warm.call(*line, cwd=folder, env=environment()).returncode == 0
    done = run(warm, folder, "", "-o", "ranks_descendants=kill")
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, "the option wins"
    refused = warm.call(*line, "-o", "ranks_descendants=kill", cwd=folder, env=environment())
    assert refused.returncode == pytest.ExitCode.USAGE_ERROR
    assert "ini ranks_descendants = 'kill': must be off or report" in refused.stderr


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
    # The program forks beside the threads of numpy: from Python 3.12 on this warns.
    result = run_example(pytester, UNNOTICED, "-W", "ignore:This process:DeprecationWarning")
    assert "rank 1 of 2 raised AssertionError: the real failure at" in result.stdout
    assert "rank 0 of 2 raised KeyError: 'no key' at" in result.stdout
    if fails == "true":
        assert result.outcomes == {"failed": 2, "passed": 1}
    else:
        assert result.outcomes == {"passed": 3, "warnings": 2}


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
    done = run_here(pytester, source)
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
    done = run_here(pytester, source)
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
    run_here(pytester, SHARED).assert_outcomes(passed=1, failed=1)
