"""Keep a rank that is done first, its threads and its connections, while other ranks may still need them.

Without this, a timeout that a test expects would become a connection error. If another rank is inside a call with a time limit,
this rank stays until that limit plus 2 s. It does not stay for a rank that has a collective under way without a limit (in any
thread, a future or autograd): the lost connection ends that collective.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from os import kill
from pathlib import Path

from nsa.trace.stall.threads import lasting_threads
from pytest_nsa.evidence.board import AFTER_LIMIT_S, read_numbers
from pytest_nsa.system.clock import monotonic, wall_clock

POLL_S = 0.02
SETTLED_S = 0.2  # in one call: a collective that can complete is left within it


def wait_for_threads(folders: Sequence[Path], done: int) -> None:
    """Wait for this process's non-daemon threads while a rank with one of ``folders`` is not done.

    An interpreter ends after these threads, so another rank may wait for what a thread sends.
    """
    while lasting := lasting_threads():
        if not _not_done(folders, done):
            return
        for thread in lasting:
            thread.join(POLL_S)


def wait_for_others(folders: Sequence[Path], done: int, longest: float) -> None:
    """Wait while a rank with one of ``folders`` works, or waits with a limit; ``longest`` seconds at most.

    ``done`` is the number of the phase 'done'. Ranks of another machine have no board here, and do not count.
    """
    began = monotonic()
    waits: dict[int, tuple[float, float]] = {}  # by pid: the call without a limit that it waits in, and since when
    while (now := monotonic()) - began < longest:
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
    """Return a number that identifies the call without a limit that a rank has under way; 0 without one."""
    if board["limit_time"] + AFTER_LIMIT_S > wall_clock():
        return 0.0
    is_pending = board["collectives_entered"] > board["collectives_left"]
    return board["blocked_in"] or (board["collectives_entered"] if is_pending else 0.0)


def _lives(pid: int) -> bool:
    try:
        kill(pid, 0)
    except OSError:
        return False
    return True
