"""What is read of ranks at a stall: children in /proc, dumps of stacks and for how long one is waited for, native frames of few."""

import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from nsa.trace.stall.stacks import MOST_THREADS, as_dump, look
from pytest_nsa.evidence.stacks import parse_dump, thread_that_shows
from pytest_nsa.observe import second_look
from pytest_nsa.observe.second_look import dump_where_useful
from pytest_nsa.system.procfs import is_runnable, list_children, look_at
from pytest_nsa.wire import messages
from pytest_nsa.wire.messages import DUMP_MAIN_SIGNAL, DUMP_SIGNAL

# A process whose handler takes a second of CPU, as that of a rank which gets little of it does, before the dump is there.
LATE = f"""
import signal, sys, time
def dump(*_):
    until = time.process_time() + 1.0
    while time.process_time() < until: pass
    open(sys.argv[1], "w").write("Current thread 0x1 (most recent call first):\\n  File \\"a.py\\", line 1 in f\\n")
signal.signal({int(DUMP_SIGNAL)}, dump)
print("ready", flush=True)
while True: signal.pause()
"""


WITHOUT_HANDLER = "print('ready', flush=True)\nwhile True: pass"


@pytest.mark.parametrize(
    ("program", "stopped", "starved_s"),
    [(LATE, False, 60.0), (LATE, True, 60.0), (WITHOUT_HANDLER, False, 1e6)],  # at work, before it could write a dump
    ids=["wants the CPU", "stopped", "without a handler"],
)
def test_a_rank_that_wants_the_cpu_is_waited_for_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, stopped: bool, starved_s: float
) -> None:
    monkeypatch.setattr(second_look, "DUMP_WAIT_S", 0.3)
    monkeypatch.setattr(second_look, "STARVED_WAIT_S", starved_s)  # so long that waiting would show
    dump = tmp_path / "stacks.txt"
    with subprocess.Popen([sys.executable, "-c", program, dump], stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout.readline() == "ready\n"
        if stopped:
            rank.send_signal(signal.SIGSTOP)
        send = rank.send_signal if program is LATE else lambda _: None
        second_look.dump_stacks({0: dump}, lambda _: send(DUMP_SIGNAL), lambda _: second_look.wants_to_dump(rank.pid))
        assert dump.exists() == (program is LATE and not stopped)
        rank.kill()


def test_native_frames_are_read_of_a_few_ranks_and_of_none_that_waits_in_a_collective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dump takes seconds: of 64 ranks that wait in one collective it took two minutes, and told what the board had told."""
    tool = tmp_path / "py-spy"
    tool.write_text('#!/bin/sh\necho "$@"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    ranks = [subprocess.Popen(["sleep", "1000"]) for _ in range(6)]
    works = "print(flush=True)\nwhile True: pass"
    ranks.append(subprocess.Popen([sys.executable, "-c", works], stdout=subprocess.PIPE))
    try:
        pids = {number: rank.pid for number, rank in enumerate(ranks)}
        assert ranks[6].stdout.read(1) == b"\n"
        while any(is_runnable(pids[rank]) for rank in range(6)):  # until they sleep
            assert ranks[6].poll() is None
        pids[7] = 0  # of another node
        files = {rank: tmp_path / f"native{rank}.txt" for rank in pids}
        told = dict(dump_where_useful(files, pids, blocked=[0]))
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    assert [rank for rank in pids if files[rank].exists()] == [1, 2, 3, 6]
    assert str(pids[6]) in files[6].read_text()
    assert {rank: told[rank] for rank in (0, 4, 6, 7)} == {
        0: "it waits in a collective", 4: "4 other ranks were looked at", 6: "", 7: "it runs on another node",
    }  # fmt: skip


def test_a_look_has_the_main_thread_among_many() -> None:
    ends = threading.Event()
    threads = [threading.Thread(target=ends.wait) for _ in range(MOST_THREADS + 20)]
    for thread in threads:
        thread.start()
    found: list[dict[int, list[object]]] = []
    looker = threading.Thread(target=lambda: found.append(look()))  # type: ignore[arg-type]
    looker.start()
    looker.join()
    ends.set()
    for thread in threads:
        thread.join()
    (stacks,) = found
    main = threading.main_thread().ident
    assert len(stacks) == MOST_THREADS
    assert next(iter(stacks)) == main
    (stack,) = [t for t in parse_dump(as_dump(stacks, main or 0)) if t.is_main]  # type: ignore[arg-type]
    assert "test_a_look_has_the_main_thread_among_many" in [f.function for f in stack.frames]


CROWDED = """
import faulthandler, os, signal, sys, threading
ends = threading.Event()
for _ in range(int(sys.argv[1])):
    threading.Thread(target=ends.wait, daemon=True).start()
main, every = map(int, sys.argv[2:])
faulthandler.register(main, all_threads=False)
faulthandler.register(every, all_threads=True)
def waits():
    os.kill(os.getpid(), main)
    os.kill(os.getpid(), every)
waits()
"""


@pytest.mark.parametrize("threads", [10, 150])
def test_faulthandler_s_two_dumps_are_read_as_one(threads: int) -> None:
    numbers = [str(int(n)) for n in (DUMP_MAIN_SIGNAL, DUMP_SIGNAL)]
    command = [sys.executable, "-c", CROWDED, str(threads), *numbers]
    text = subprocess.run(command, text=True, capture_output=True, check=True).stderr
    stacks = parse_dump(text)
    (main,) = [stack for stack in stacks if stack.is_main]
    assert [frame.function for frame in main.frames] == ["waits", "<module>"]
    assert len(stacks) == min(threads + 1, messages.MOST_THREADS + 1)
    # Without the first dump it is not known what the main thread of a crowded process does, and no other takes its part.
    told = thread_that_shows(parse_dump(text[re.search("^(Thread|Current)", text, re.M).start() :]))  # type: ignore[union-attr]
    assert (told is None) == (threads > messages.MOST_THREADS)


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
    assert shown in state.ended
    assert shown not in state.children
    after = look_at(os.getpid())
    assert shown not in after.ended
