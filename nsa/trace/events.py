"""The events that a rank records at once: one JSON line each in ``events.jsonl``, in one write: a kill loses at most one."""

import contextlib
import errno
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nsa.trace.files import close, open_to_append, wall_clock, write
from nsa.trace.strict_json import to_json

SCHEMA = 1  # of the files that ranks write; job.json and env.json have it, for the JSON lines next to them

_is_muted = False

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO})


@contextlib.contextmanager
def ignore_full_disk() -> Iterator[None]:
    """Ignore the errors of a full disk, or of a file that may not grow: the traced program continues without the evidence."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise


def mute(is_muted: bool) -> None:
    """Write no more lines from this process: a fork of a rank must not write in the rank's name. False: write again."""
    global _is_muted
    _is_muted = is_muted


def append(path: Path, entry: dict[str, Any]) -> None:
    """Append a line of JSON; do nothing in a process that is muted."""
    if _is_muted:
        return
    with ignore_full_disk():
        fd = open_to_append(path)
        try:
            write(fd, (to_json(entry, as_text=True) + "\n").encode())
        finally:
            close(fd)


def record(folder: Path, **event: Any) -> None:
    """Append to ``events.jsonl``."""
    append(folder / "events.jsonl", {"time": wall_clock(), **event})


def local_rank(otherwise: int) -> int:
    """Return this rank's number on its machine, by torchrun's or SLURM's variable; ``otherwise`` without one."""
    return int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or otherwise)


def machine(*, on_gpu: bool = False) -> str:
    """Return 'node5', or 'node5, GPU 2' for a rank on a GPU, with the machine's number of the GPU."""
    if not on_gpu:
        return platform.node()
    local = local_rank(0)
    visible = [v for v in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if v]
    return f"{platform.node()}, GPU {visible[local % len(visible)] if visible else local}"
