"""The processes that a run may leave behind."""

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
