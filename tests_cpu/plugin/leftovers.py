"""What a run may leave behind: its processes, and the plugin's files in the folders for temporary files."""

from __future__ import annotations

import os
import time
from pathlib import Path


def processes_below(folder: Path) -> list[str]:
    """Return the command lines of the processes, except this one, with a working directory in ``folder``.

    A process that ends has no command line any more, and its directory for a moment longer.
    """
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        if entry.name == str(os.getpid()):
            continue  # pytester has changed this process's own directory
        try:
            if Path(os.readlink(entry / "cwd")).is_relative_to(folder) and (line := (entry / "cmdline").read_text()):
                found.append(line.replace("\0", " "))
        except OSError:
            continue
    return found


def no_process_is_left(folder: Path) -> None:
    """Assert that no process is left in ``folder``, within the time that the kernel and the last process take."""
    deadline = time.monotonic() + 20
    while processes_below(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_below(folder) == []


OTHERS_S = 60.0  # for sessions of other tests that run now to end, with their files


def ours_in_temporary_folders() -> set[Path]:
    """Return the plugin's files in /tmp and /dev/shm."""
    return {path for folder in ("/tmp", "/dev/shm") for path in Path(folder).glob("pytest-nsa*")}


def that_stay(files: set[Path]) -> set[Path]:
    """Return those files that are still there when sessions of other tests have had time to end."""
    deadline = time.monotonic() + OTHERS_S
    while (there := {path for path in files if path.exists()}) and time.monotonic() < deadline:
        time.sleep(0.2)
    return there
