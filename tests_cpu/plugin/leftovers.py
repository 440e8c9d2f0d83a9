"""What a run may leave behind: its processes, and the plugin's files in the folders for temporary files."""

from __future__ import annotations

import os
from pathlib import Path


def processes_below(folder: Path) -> list[str]:
    """Return the command lines of the processes, except this one, with a working directory in ``folder``."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        if entry.name == str(os.getpid()):
            continue  # pytester has changed this process's own directory
        try:
            if Path(os.readlink(entry / "cwd")).is_relative_to(folder):
                found.append((entry / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def ours_in_temporary_folders() -> set[str]:
    """Return the names of the plugin's files in /tmp and /dev/shm."""
    return {p.name for folder in ("/tmp", "/dev/shm") for p in Path(folder).glob("pytest-nsa*")}
