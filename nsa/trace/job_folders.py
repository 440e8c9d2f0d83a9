"""The folders of evidence for jobs that tests start by themselves: one per job, inside one for the session."""

import contextlib
import faulthandler
import hashlib
import os
import signal
from pathlib import Path
from typing import Any

from nsa.trace.files import open_to_append

FOLDER, HOST = "NSA_TRACE_JOBS", "NSA_TRACE_HOST"  # the folder of a session's jobs; the process that runs its tests
# The file in that folder to which stacks are written, and the signal that requests them.
STACKS, STACKS_SIGNAL = "stacks.txt", getattr(signal, "SIGRTMIN", 34) + 6


def is_requested() -> bool:
    """Return whether this process leaves evidence in a job's folder: the process that runs the test does not."""
    return bool(os.environ.get(FOLDER)) and os.environ.get(HOST) != str(os.getpid())


def dump_at_signal() -> None:
    """Append the stacks of this process to a file when the process that runs the test sends a signal. Forks inherit this."""
    with contextlib.suppress(OSError):  # a session that has ended
        fd = open_to_append(Path(os.environ[FOLDER], STACKS))
        faulthandler.register(STACKS_SIGNAL, file=fd, all_threads=True, chain=False)


def begin(rank: int, world_size: int, given: dict[str, Any]) -> None:
    """Trace this rank from now on; ``given`` are the arguments of its ``init_process_group``.

    The level is light (collectives, stacks and exceptions), unless NSA_TRACE_LEVEL is set.
    """
    os.environ.setdefault("NSA_TRACE_LEVEL", "light")
    from nsa.trace.training import trace_training

    trace_training(_folder(rank, world_size, given), rank, world_size)


def _folder(rank: int, world_size: int, given: dict[str, Any]) -> Path:
    """Return the folder of this rank's job, named by what its ranks have in common; a numbered one if it has this rank already."""
    address = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
    method = str(given.get("init_method") or "env://")
    place = address if method.startswith("env") else method
    if given.get("store") is not None:
        place = "store"
    attempt = f"{os.environ.get('TORCHELASTIC_RUN_ID', '')} {os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}"
    key = hashlib.sha256(f"{os.getppid()} {place} {world_size} {attempt}".encode()).hexdigest()[:8]
    base, number = Path(os.environ[FOLDER]) / f"job-{key}", 0
    while True:
        folder = base if not number else base.with_name(f"{base.name}.{number}")
        try:
            (folder / f"rank{rank}").mkdir(mode=0o700, parents=True)
            return folder
        except FileExistsError:
            number += 1
