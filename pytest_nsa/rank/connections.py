"""What a rank does for its groups before and after its test: those after its first, and connections that other ranks still need.

Without the latter, a timeout that a test expects would become a connection error. If another rank is inside a call with a time
limit, a rank that is done first stays until that limit plus 2 s. It does not stay for a rank that has a collective under way
without a limit (in any thread, a future or autograd): the lost connection ends that collective.
"""

import importlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from os import kill
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nsa.trace.autostart import mark_as_traced
from nsa.trace.stall.threads import lasting_threads
from pytest_nsa.evidence.board import AFTER_LIMIT_S, read_numbers
from pytest_nsa.system.clock import monotonic, wall_clock

ADDRESS, PORT = "MASTER_ADDR", "MASTER_PORT"


def set_first(ports: Sequence[int]) -> None:
    """Name the first port in the environment, before a test reads it."""
    if ports:
        os.environ.update({ADDRESS: "127.0.0.1", PORT: str(ports[0])})


def change_after_each(ports: Sequence[int]) -> None:
    """Let MASTER_PORT name the next of ``ports`` for each group after the first that all ranks have formed.

    A group that is destroyed and made again on one port is a race: a rank that is ahead connects to the old group's store, which
    rank 0 is about to close. A port that the test itself has set is not changed.
    """
    rendezvous = importlib.import_module("torch.distributed.rendezvous")  # the package has a function of this name
    handlers: dict[str, Any] = getattr(rendezvous, "_rendezvous_handlers", {})
    meet = handlers.get("env")
    if not ports or meet is None:
        return
    met = 0

    def meet_on_another(url: str, *args: Any, **kwargs: Any) -> Iterator[Any]:
        nonlocal met
        ours = str(ports[(met - 1) % len(ports)])
        if met and os.environ.get(PORT) == ours:
            os.environ[PORT] = str(ports[met % len(ports)])
            mark_as_traced()
        for found in meet(url, *args, **kwargs):
            met += 1  # the store has waited for all ranks, so this number is equal on all
            yield found

    handlers["env"] = meet_on_another


def meeting_store(rank: int, ports: Sequence[int]) -> dist.Store | None:
    """Return a store that rank 0 serves on the last of ``ports``, ten times as fast as the zygote's; None without ports."""
    if not ports:
        return None
    limit = timedelta(seconds=60)
    return dist.TCPStore("127.0.0.1", ports[-1], is_master=rank == 0, wait_for_workers=False, timeout=limit)


_left: list[object] = []


def leave_group() -> None:
    """Forget the default group, if there is one. Its connections stay open until this process ends: gloo takes 20 ms to close them,
    and holds the GIL in that time. The host bounds their number (`pytest_nsa.session.runner`).
    """
    if not dist.is_initialized():
        return
    group = dist.distributed_c10d._get_default_group()
    device = torch.device("cuda" if "cuda" in str(group._device_types) else "cpu")
    _left.extend((group, group._get_backend(device)))
    dist.destroy_process_group()


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
