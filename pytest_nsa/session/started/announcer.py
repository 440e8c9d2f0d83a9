"""Start the program that announces suspicions in a test's jobs (`announce`), and describe the test to it in a file."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Collection

# Bound at import: a test may replace the functions of os, and count their calls.
from os import posix_spawn, waitpid
from pathlib import Path

import pytest

from pytest_nsa.observe.terminal import without_capture
from pytest_nsa.report.runs import ANNOUNCEMENTS
from pytest_nsa.session.folders import RunFolder
from pytest_nsa.system.descendants import without_child_handler
from pytest_nsa.system.procfs import began
from pytest_nsa.wire import masking
from pytest_nsa.wire.files import read_lines, write_json

_PROGRAM = Path(__file__).with_name("announce.py")


class JobAnnouncer:
    """Announces on standard error, past pytest's capture. ``folder``: of the session's jobs."""

    def __init__(self, config: pytest.Config, folder: Path) -> None:
        self.path = folder / "test.json"
        self._has_begun = False
        arguments = [str(self.path), str(os.getpid()), str(began(os.getpid()))]
        self._command = [sys.executable, "-I", "-S", str(_PROGRAM), *arguments, json.dumps(sys.path)]
        with without_capture(config):
            self._screen = os.dup(2)

    def follow(self, nodeid: str, others: Collection[Path] = ()) -> None:
        """Announce suspicions in the jobs of a test from now on, ``others`` excepted; '' for no test."""
        described = {"nodeid": nodeid, "others": sorted(map(str, others)), "masks": masking.is_on()}
        with contextlib.suppress(OSError):
            write_json(self.path, described)
            if not self._has_begun:
                self._has_begun = True
                if os.getpid() != 1:  # process 1 of a container becomes the parent of the program
                    self._begin()

    def hand_to(self, run: RunFolder) -> None:
        """Add what was announced to a run's announcements, once the run has a folder: a session that passes makes none."""
        if not run.is_made:
            return
        announced = self.path.with_name(ANNOUNCEMENTS)
        taken = announced.with_suffix(".taken")
        with contextlib.suppress(OSError):  # nothing was announced
            announced.rename(taken)  # the program may append to it
            for entry in read_lines(taken):
                run.announce(str(entry.get("text", "")), time=entry.get("time"), printed=True)

    def _begin(self) -> None:
        silent = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
        redirected = [silent, (os.POSIX_SPAWN_DUP2, self._screen, 1), (os.POSIX_SPAWN_DUP2, self._screen, 2)]
        # Not by subprocess: its hook would take this program for a process of the test's.
        with without_child_handler(), contextlib.suppress(ChildProcessError):  # where SIGCHLD is ignored
            waitpid(posix_spawn(sys.executable, self._command, {}, file_actions=redirected), 0)  # it forks, and ends

    def close(self) -> None:
        """Close the terminal; the program ends when its folder is deleted."""
        os.close(self._screen)
