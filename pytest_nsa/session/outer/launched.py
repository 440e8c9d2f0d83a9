"""The session log of a pytest process under an outer launcher, written as it happens and read by its clock (`clock`)."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pytest_nsa.observe import host_log
from pytest_nsa.report.runs import LOCK, hold, is_in_use
from pytest_nsa.settings import OuterLauncher, child_environment
from pytest_nsa.system.clock import wall_clock
from pytest_nsa.system.disk_space import private_folder
from pytest_nsa.system.procfs import began
from pytest_nsa.wire.files import write_atomically

outer_key = pytest.StashKey[Any]()  # the hooks of an outer launcher, where there is one
LOG, SETUP = "session.jsonl", "session.json"
_PREFIX = "launch-"


def launch_key(outer: OuterLauncher) -> str:
    """Return a key that is equal in the processes of one launch on this machine, and differs in any other launch."""
    parent = os.getppid()
    text = f"{parent} {began(parent)} {outer.address}:{outer.port} {outer.world_size} {outer.attempt}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class NoSessionLog:
    """The log where no folder can be made for one: nothing is kept, and no clock runs."""

    run: Path | None = None

    def __init__(self, outer: OuterLauncher) -> None:
        self.launch = launch_key(outer)

    def start_clock(self, output: int, **setup: Any) -> None:
        """No-op."""

    def note(self, event: str, **facts: Any) -> None:
        """No-op."""

    def report(self, report: Any) -> None:
        """No-op."""

    def close(self) -> None:
        """No-op."""


def open_log(config: pytest.Config, outer: OuterLauncher) -> NoSessionLog:
    """Return the log of this process's session; one that keeps nothing, with a warning, where there is no folder for it."""
    try:
        return SessionLog(config, outer, private_folder())
    except OSError as error:
        reason = f"no evidence of tests that run in this process, and no clock for them: {error}"
        config.issue_config_time_warning(pytest.PytestWarning(reason), stacklevel=2)
        return NoSessionLog(outer)


class SessionLog(NoSessionLog):
    """``FOLDER/rankR/session.jsonl``: one line per event: which test runs, its time limit, each report."""

    run: Path

    def __init__(self, config: pytest.Config, outer: OuterLauncher, root: Path) -> None:
        super().__init__(outer)
        self.config, self.outer = config, outer
        sweep(*root.glob(f"{_PREFIX}*"))
        self.run = root / f"{_PREFIX}{self.launch}"
        self.folder = self.run / f"rank{outer.rank}"
        shutil.rmtree(self.folder, ignore_errors=True)  # of a process with this number before this one
        self.folder.mkdir(mode=0o700, parents=True)
        self._lock = hold(self.run)
        self._clock: subprocess.Popen[bytes] | None = None

    def start_clock(self, output: int, **setup: Any) -> None:
        """Start the process that ends a test which is past its time limit: this one's main thread may be in native code.

        ``output`` is the file descriptor of the terminal or its replacement; ``setup`` is what the clock needs to report.
        """
        setup |= {
            "host": os.getpid(), "rank": self.outer.rank, "world_size": self.outer.world_size, "launch": self.launch,
            "root": str(self.config.rootpath), "created": wall_clock(),
        }  # fmt: skip
        write_atomically(self.folder / SETUP, json.dumps(setup))
        # Started by its path, not as a module: it imports the plugin only when it has something to report.
        self._clock = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("clock.py")), str(self.folder)],
            stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True, env=child_environment(),
        )  # fmt: skip

    def note(self, event: str, **facts: Any) -> None:
        """Append a line."""
        host_log.note(self.folder / LOG, event, **facts)

    def report(self, report: Any) -> None:
        """Append a report of a test."""
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        if data is not None:
            self.note("report", text=str(report.longreprtext), report=data)

    def close(self) -> None:
        """End the clock: the session has reported everything itself. The last process of the launch deletes the folder."""
        self.note("finish")
        if self._clock is not None:
            self._clock.communicate()
        os.close(self._lock)
        sweep(self.run)


def sweep(*runs: Path) -> None:
    """Delete the folders of launches that have no live process."""
    for run in runs:
        if (run / LOCK).exists() and not is_in_use(run):
            shutil.rmtree(run, ignore_errors=True)
