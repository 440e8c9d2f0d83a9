"""Sessions of pytest that a test starts, waits for and sends signals to, and that must leave no process."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests_cpu.plugin.leftovers import processes_below


def start_session(folder: Path, source: str, *options: str) -> subprocess.Popen[str]:
    """Run pytest over ``source`` in ``folder``, in a process group of its own. SIGINT and SIGHUP end it, even if ignored here."""
    (folder / "test_example.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:randomly", "--rootdir", str(folder)]
    return subprocess.Popen(
        [*command, *options], cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        # A shell's background jobs ignore the one, what runs under nohup the other.
        preexec_fn=lambda: [signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGHUP)],
    )  # fmt: skip


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    """Wait for ``condition`` while ``process`` runs; a minute at most."""
    deadline = time.monotonic() + 60
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
