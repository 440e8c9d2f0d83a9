"""Keep a rank that is done first, its threads and its connections, while other ranks may still need them.

Without this, a timeout that a test expects would become a connection error. Where another rank is inside a call with its own
limit, this one stays until that limit, and 2 s. It does not stay for a rank that has a collective under way without a limit,
whether its main thread waits for it, another thread, a future or autograd does, or it polls: the lost connection ends that.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from nsa.trace.stall.threads import lasting_threads
from pytest_nsa.evidence.board import AFTER_LIMIT_S, read_numbers

POLL_S = 0.02
SETTLED_S = 0.2  # in one call: a collective that is only begun is left within it


def wait_for_threads(folders: Sequence[Path], done: int) -> None:
    """Wait for this process's threads that are no daemons while a rank of those with ``folders`` is not done.

    An interpreter ends after them: what one of them sends, another rank may wait for. Where no rank does, they are left.
    """
    while lasting := lasting_threads():
        if not _not_done(folders, done):
            return
        for thread in lasting:
            thread.join(POLL_S)


def wait_for_others(folders: Sequence[Path], done: int, longest: float) -> None:
    """Stay while a rank of those whose folders are ``folders`` is at work, or waits with a limit, ``longest`` seconds at most.

    ``done`` is the number of the phase of a rank that is done. Ranks of another machine have no board here, and do not count.
    """
    began = time.monotonic()
    waits: dict[int, tuple[float, float]] = {}  # by process: the call it waits in without a limit, and since when
    while (now := time.monotonic()) - began < longest:
        others = _not_done(folders, done)
        calls = {p: _call_without_limit(b) for p, b in others.items()}
        waits = {p: waits[p] if p in waits and waits[p][0] == call else (call, now) for p, call in calls.items()}
        if not others or any(call and now - since > SETTLED_S for call, since in waits.values()):
            return
        time.sleep(POLL_S)


def _not_done(folders: Sequence[Path], done: int) -> dict[int, Mapping[str, float]]:
    """Return the numbers on the boards of the ranks that live and are not done, by process."""
    boards = [read_numbers(folder / "board.bin") for folder in folders]
    return {int(b["pid"]): b for b in boards if b and b["phase"] != done and _lives(int(b["pid"]))}


def _call_without_limit(board: Mapping[str, float]) -> float:
    """Return a number of the call that a rank has under way and that nothing ends; 0 for none."""
    if board["limit_time"] + AFTER_LIMIT_S > time.time():
        return 0.0
    is_pending = board["collectives_entered"] > board["collectives_left"]
    return board["blocked_in"] or (board["collectives_entered"] if is_pending else 0.0)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
