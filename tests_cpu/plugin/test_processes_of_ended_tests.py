"""The processes of a test that its time limit ends: the test may end them itself, and no pool blocks the session."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests_cpu.plugin.test_descendants import alive, command, environment, folder, line_of, run
from tests_cpu.warm import WarmPython

__all__ = ["folder"]

HEAD = """
from common import *
import multiprocessing, pytest, threading
from concurrent.futures import ProcessPoolExecutor

fork = multiprocessing.get_context("fork")
lock, one = fork.Lock(), fork.Barrier(2)

def hold(number):
    here(f"task{number}")
    lock.acquire()  # the first task never releases it
    return number

def at_lock():
    at_limit("task1", "task2")
"""
# Of the two workers one holds the queue's lock while it waits for a task: a pool that lost that one would wait for it for ever.
POOL = """
def test_it():
    with fork.Pool(2) as pool:
        found = pool.map_async(hold, [1, 2], chunksize=1)
        at_lock()
        found.get()
"""
FIXTURE = """
@pytest.fixture
def pool():
    with fork.Pool(2) as pool:
        yield pool

def test_it(pool):
    found = pool.map_async(hold, [1, 2], chunksize=1)
    at_lock()
    found.get()
"""
CLOSES = """
def test_it():
    pool = fork.Pool(2)
    try:
        found = pool.map_async(hold, [1, 2], chunksize=1)
        at_lock()
        found.get()
    finally:
        pool.close()
        pool.join()
"""
EXECUTOR = """
def test_it():
    with ProcessPoolExecutor(2, mp_context=fork) as executor:
        found = [executor.submit(hold, number) for number in (1, 2)]
        at_lock()
        for future in found:
            future.result()
"""
# What the cleanup waits for comes from no process.
CLEANUP = """
def test_it():
    child = fork.Process(target=hold, args=(1,))
    lock.acquire()
    child.start()
    try:
        at_limit("task1")
        child.join()
    finally:
        threading.Event().wait()
"""
AFTER = """
def test_after():
    assert multiprocessing.active_children() == []
    subprocess.run(["true"], check=True)  # its end calls the handler of SIGCHLD
"""


@pytest.mark.parametrize(
    ("source", "mode"),
    [
        pytest.param(POOL, "report", id="a pool"),
        pytest.param(FIXTURE, "report", id="a fixture's pool", marks=pytest.mark.slow),
        pytest.param(CLOSES, "end", id="a pool that is closed"),
        pytest.param(EXECUTOR, "end", id="an executor", marks=pytest.mark.slow),
        pytest.param(CLEANUP, "end", id="a cleanup that waits", marks=pytest.mark.slow),
    ],
)
def test_a_test_at_its_limit_ends_and_so_does_the_session(
    warm: WarmPython, folder: Path, source: str, mode: str
) -> None:
    done = run(warm, folder, HEAD + source + AFTER, "-rfE", mode=mode)
    assert "1 failed, 1 passed" in done.stdout, done.stdout
    assert "from pytest-timeout" in next(line for line in done.stdout.splitlines() if line.startswith("FAILED"))
    assert "in test_it" in next(line for line in done.stdout.splitlines() if line.startswith("  waits "))
    assert "still running" not in done.stdout
    assert "has failed" not in done.stdout, "the session has ended it"
    at = f"a fork of this session: at test_it.py:{line_of(HEAD, 'lock.acquire')} in hold"
    assert any(at in line for line in done.stdout.splitlines() if line.startswith("  process ")), done.stdout
    assert alive(folder) == []


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


def test_workers_of_a_loader_that_are_ended_fail_no_later_test(warm: WarmPython, folder: Path) -> None:
    done = run(warm, folder, LOADER)
    assert "1 failed, 1 passed" in done.stdout, done.stdout
    assert "DataLoader worker" not in done.stdout
    assert f": at test_it.py:{line_of(LOADER, 'os.read')} in __getitem__" in done.stdout
    assert alive(folder) == []


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


def test_a_child_that_was_spawned_shows_the_lines_of_its_threads(warm: WarmPython, folder: Path) -> None:
    done = run(warm, folder, SPAWNED)
    at = f"test_it.py:{line_of(SPAWNED, 'with lock')} in inner"
    assert f": at {at}" in done.stdout, done.stdout
    assert alive(folder) == []


# The server is a child of the first test, and serves the second, too.
FORK_SERVER = """
from common import *
import multiprocessing

def wait(name):
    here(name)
    os.read(os.pipe()[0], 1)

def run(name):
    child = multiprocessing.get_context("forkserver").Process(target=wait, args=(name,))
    child.start()
    at_limit(name)
    child.join()

def test_first():
    run("first")

def test_second():
    run("second")
"""


def test_what_the_fork_server_makes_belongs_to_the_test_that_runs(folder: Path) -> None:
    (folder / "test_it.py").write_text(FORK_SERVER)
    done = subprocess.run(
        command(mode="end"), cwd=folder, env=environment(), capture_output=True, text=True, check=False, timeout=170
    )
    shown = [line for line in done.stdout.splitlines() if line.startswith("  process ")]
    assert len(shown) == 2, done.stdout
    assert all(line.endswith("a child by multiprocessing's fork server") for line in shown), shown
    assert "keep this session from ending" not in done.stderr
    assert alive(folder) == []


UPLOADS = """
import multiprocessing, time
from pathlib import Path

def upload():
    for _ in range(14):
        Path("upload").write_bytes(bytes(1_000_000))
        time.sleep(1)
    Path("done").touch()

def test_it():
    multiprocessing.get_context("fork").Process(target=upload).start()
"""


@pytest.mark.slow
def test_a_process_that_moves_data_at_exit_is_not_ended(folder: Path) -> None:
    (folder / "test_it.py").write_text(UPLOADS)
    done = subprocess.run(
        command(), cwd=folder, env=environment(), capture_output=True, text=True, check=False, timeout=170
    )
    assert done.returncode == 0, done.stdout
    assert (folder / "done").exists()
    assert "keep this session from ending" not in done.stderr


def test_ctrl_c_shows_the_lines_of_children_too(warm: WarmPython, folder: Path) -> None:
    source = HEAD + POOL.replace("at_lock()", "at_lock()\n        signal.raise_signal(signal.SIGINT)")
    done = run(warm, folder, source)
    assert done.returncode == pytest.ExitCode.INTERRUPTED, done.stdout
    shown = done.stdout.partition("interrupted; until then")[2]
    assert f": at test_it.py:{line_of(HEAD, 'lock.acquire')} in hold" in shown
    assert alive(folder) == []
