"""Children of a process, and how they have ended, as /proc shows them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import threading

import pytest

from pytest_nsa.system.procfs import list_children, look_at


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
        assert {process.pid, started[0].pid} <= set(list_children(os.getpid()))
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
