"""Sessions of pytest that a test starts, waits for and sends signals to, and that must leave no process."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests_cpu.plugin.leftovers import processes_below
from tests_cpu.warm import WarmPython


def start_session(warm: WarmPython, folder: Path, source: str, *options: str) -> subprocess.Popen[str]:
    """Run pytest over ``source`` in ``folder``, in a process group of its own. SIGINT and SIGHUP end it, even if ignored here."""
    (folder / "test_example.py").write_text(source)
    command = ["-m", "pytest", "-p", "no:cacheprovider", "-p", "no:randomly", "--rootdir", str(folder)]
    return warm.popen(
        *command, *options, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    """Wait for ``condition`` while ``process`` runs; 90 s at most."""
    deadline = time.monotonic() + 90
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def no_process_is_left(folder: Path) -> None:
    """Assert that no process is left in ``folder``, within the time that the kernel and the last of them take."""
    deadline = time.monotonic() + 20
    while processes_below(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_below(folder) == []
