"""Ranks with more threads, or frames, than a dump has: their main thread is the one that counts."""

from __future__ import annotations

import re
import subprocess
import sys
import threading

import pytest

from nsa.trace.stall.stacks import MOST_THREADS, as_dump, look
from pytest_nsa.evidence.stacks import parse_dump, thread_that_shows
from pytest_nsa.testing import run_example
from pytest_nsa.wire import messages
from pytest_nsa.wire.messages import DUMP_MAIN_SIGNAL, DUMP_SIGNAL

SOURCE = """
import re

def start_idle(count):
    ends = threading.Event()
    for _ in range(count):
        threading.Thread(target=ends.wait, daemon=True).start()

@pytest.mark.timeout(8)
@world_size(2)
def test_sleeps(group):
    start_idle(150)
    if group.rank == 1:
        time.sleep(1000)
    dist.barrier()

@pytest.mark.timeout(8)
@world_size(2)
def test_holds_the_gil(group):
    start_idle(150)
    if group.rank == 1:
        re.match(r"(a+)+b", "a" * 40)
    dist.barrier()

def descend(depth):
    # Fast until the stack is much deeper than a dump, then slow enough for the machine's memory.
    return descend(depth + 1) if depth < 2_000_000 else descend(depth + bool(sum(range(3000))))

@pytest.mark.timeout(12)
@world_size(2)
def test_descends_without_an_end(group):
    sys.setrecursionlimit(10**9)
    if group.rank == 1:
        descend(0)
    dist.barrier()

@pytest.mark.timeout(20)
@world_size(2)
def test_makes_an_extra_call(group):
    start_idle(150)
    for _ in range(3):
        dist.barrier()
    if group.rank == 1:
        dist.barrier()
"""


@pytest.mark.slow
def test_the_main_thread_s_wait_is_the_rank_s(pytester: pytest.Pytester) -> None:
    result = run_example(pytester, SOURCE)
    found = {name: (v.cause, v.ranks, v.where.rpartition(" in ")[0]) for name, v in result.verdicts.items()}
    assert found == {
        "test_sleeps": ("sleeping", (1,), "test_example.py:18"),
        "test_holds_the_gil": ("gil_held", (1,), "test_example.py:26"),
        "test_descends_without_an_end": ("infinite_loop", (1,), "test_example.py:31"),
        "test_makes_an_extra_call": ("extra_collective", (1,), "test_example.py:48"),
    }
    dump = parse_dump((result.folder("test_holds_the_gil") / "rank1" / "stacks.txt").read_text())
    assert [t.frames[-1].function for t in dump if t.is_main] != ["_bootstrap"]


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
