"""Ranks with more threads, or frames, than a dump has: their main thread is the one that counts."""

from __future__ import annotations

import re
import subprocess
import sys
import threading

import pytest

from nsa.trace.stall.stacks import MOST_THREADS, as_dump, look
from pytest_nsa.evidence.stacks import parse_dump, thread_that_shows
from pytest_nsa.wire import messages
from pytest_nsa.wire.messages import DUMP_MAIN_SIGNAL, DUMP_SIGNAL


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
