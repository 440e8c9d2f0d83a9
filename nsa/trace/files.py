"""Write files in a folder of evidence: append to them, or replace them as a whole. No link in the folder is followed.

Also the clock: a test may freeze `time.time`, or make `os.write` raise as on a full disk. The tracers call the functions that were
bound at import; tools that freeze time do not replace `clock_gettime`.
"""

import contextlib
import json
import os
from os import close as close
from os import open as open_fd
from os import write as write
from pathlib import Path
from time import CLOCK_MONOTONIC, CLOCK_REALTIME, clock_gettime
from time import sleep as sleep

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
LONGEST = 1 << 16  # characters of a file's first line that are read


def wall_clock() -> float:
    """Return seconds since the epoch."""
    return clock_gettime(CLOCK_REALTIME)


def monotonic() -> float:
    """Return seconds since an unspecified moment, by a clock that is never set back."""
    return clock_gettime(CLOCK_MONOTONIC)


def open_to_append(path: str | os.PathLike[str]) -> int:
    """Return a descriptor that appends to a file, which is made if it does not exist. Raises OSError, also for a link."""
    return open_fd(path, _FLAGS | os.O_APPEND, 0o666)


def write_atomically(path: Path, content: str | bytes, *, follow: bool = False, synced: bool = False) -> None:
    """Replace ``path`` by ``content``: a reader sees the old file or the new one. Raises OSError.

    With ``follow`` the folder of ``path`` may be a link, for a path that the user has named. With ``synced`` the new file is on the
    disk before it replaces the old one.
    """
    data = memoryview(content.encode(errors="backslashreplace") if isinstance(content, str) else content)
    folder = open_fd(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    try:
        partial = f".{path.name}.{os.urandom(8).hex()}.partial"
        fd = open_fd(partial, _FLAGS | os.O_EXCL, 0o666, dir_fd=folder)
        try:
            try:
                while data:
                    data = data[write(fd, data) :]
                if synced:
                    os.fsync(fd)
            finally:
                close(fd)
            os.rename(partial, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(partial, dir_fd=folder)
            raise
        if synced:
            os.fsync(folder)
    finally:
        close(folder)


def find_writer(folder: Path) -> int:
    """Return the process that writes to a rank's folder: of another job, or one that started this process; 0 without any."""
    try:
        with open(folder / "events.jsonl", encoding="utf-8") as events:
            pid = int(json.loads(events.readline(LONGEST))["pid"])
        is_in_use = pid != os.getpid() and str(folder / "board.bin") in Path(f"/proc/{pid}/maps").read_text()
    except (OSError, ValueError, IndexError, TypeError, KeyError):  # no such file, or not a rank's
        return 0
    return pid if is_in_use else 0
