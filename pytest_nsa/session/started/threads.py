"""Name the threads that keep this process from ending after its last test: those that wait for a thread that no longer acts."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

from pytest_nsa.evidence.source import Sources, record_sources
from pytest_nsa.evidence.stacks import Frame, ThreadStack
from pytest_nsa.evidence.waiting import wait_for_ever

LOOK_S = 1.0


def watch_exit(earlier: Collection[threading.Thread], show: Callable[[list[str]], None]) -> None:
    """Show once which threads keep this process from ending, where all wait at the same lines in two looks. Returns at once.

    Threads that ran ``earlier`` than the tests (those of plugins) end no wait of a test's thread.
    """
    if _has_others():
        threading.Thread(target=_watch, args=({t.ident for t in earlier}, show), daemon=True).start()


def _has_others() -> bool:
    return any(not t.daemon and t is not threading.main_thread() for t in threading.enumerate())


def _watch(earlier: set[int | None], show: Callable[[list[str]], None]) -> None:
    seen: list[ThreadStack] = []
    while _has_others():
        time.sleep(LOOK_S)
        before, seen = seen, _read_stacks(earlier)
        if seen == before and wait_for_ever(seen, _read_sources(seen), has_children=_has_children()):
            places = [stack.user_frame.describe() for stack in seen if stack.user_frame is not None]
            show([f"nsa: the session is over, and its process waits for a thread at {place}" for place in places])
            return


def _read_sources(threads: list[ThreadStack]) -> Sources:
    frames = (thread.user_frame for thread in threads)
    places = [(frame.file, frame.line) for frame in frames if frame is not None]
    return record_sources(Path(), places, Sources(), keep=False)


def _has_children() -> bool:
    module = sys.modules.get("multiprocessing.process")  # no other child can set what a thread polls
    return module is not None and bool(module.active_children())


def _read_stacks(earlier: set[int | None]) -> list[ThreadStack]:
    main = threading.main_thread().ident
    others = earlier - {main} | {threading.get_ident()}
    found = []
    for ident, frame in sys._current_frames().items():
        frames, at = [], frame if ident not in others else None
        while at is not None:
            frames.append(Frame(at.f_code.co_filename, at.f_lineno, at.f_code.co_name))
            at = at.f_back
        if frames:
            found.append(ThreadStack(tuple(frames), is_main=ident == main))
    return found
