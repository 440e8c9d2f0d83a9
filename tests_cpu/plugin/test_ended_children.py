"""ranks_descendants ends what multiprocessing would wait for, and nothing that the program ends by itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
RAISES = """
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


def run(pytester: pytest.Pytester, source: str, *options: str) -> pytest.RunResult:
    pytester.makepyfile(source)
    return pytester.runpytest_subprocess("--ranks-descendants=report", "-p", "no:randomly", *options, timeout=120)


@pytest.mark.parametrize(("source", "fails"), [(MANAGER, "true"), (AT_EXIT, "false")], ids=["a manager", "atexit"])
def test_what_ends_at_exit_keeps_no_session_from_ending(pytester: pytest.Pytester, source: str, fails: str) -> None:
    pytester.makepyfile(source)
    # Not `run`: its interpreter leaves without multiprocessing's finalizers, and the manager would stay.
    line = [sys.executable, "-m", "pytest", "--ranks-descendants=report", "-o", f"ranks_left_fails={fails}"]
    done = subprocess.run(line, cwd=pytester.path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout
    assert "keep this session from ending" not in done.stderr


def test_a_handler_of_the_program_does_not_take_the_place_of_the_time_limit(pytester: pytest.Pytester) -> None:
    shown = run(pytester, RAISES, "--timeout=3").stdout.str()
    assert "Failed: Timeout" in shown
    assert "sleep 1000" in shown  # the processes of the test are named
    assert "exited unexpectedly" not in shown.partition("short test summary")[2]


def test_a_handler_of_the_program_is_called_for_its_own_children_alone(pytester: pytest.Pytester) -> None:
    run(pytester, HANDLES).assert_outcomes(passed=2)
    run(pytester, HANDLES.replace("test_counts", "count"), "--timeout=60").assert_outcomes(passed=1)
