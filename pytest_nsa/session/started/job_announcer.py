"""Start the program that announces suspicions in a test's jobs (`cli.announce`), and describe the test to it in a file."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

from pytest_nsa.monitor.terminal import without_capture
from pytest_nsa.system.descendants import without_child_handler
from pytest_nsa.system.procfs import began
from pytest_nsa.wire import masking
from pytest_nsa.wire.files import write_json

_PROGRAM = Path(__file__).parents[2] / "cli" / "announce.py"


class JobAnnouncer:
    """Announces on standard error, past pytest's capture. ``folder``: of the session's jobs."""

    def __init__(self, config: pytest.Config, folder: Path) -> None:
        self.path = folder / "test.json"
        self._has_begun = False
        with without_capture(config):
            self._screen = os.dup(2)

    def follow(self, nodeid: str, of_fixtures: Collection[int]) -> None:
        """Announce suspicions in the jobs of a test from now on, those of processes in ``of_fixtures`` excepted; '' for no test."""
        described = {"nodeid": nodeid, "of_fixtures": sorted(of_fixtures), "masks": masking.is_on()}
        with contextlib.suppress(OSError):
            write_json(self.path, described)
            if not self._has_begun:
                self._has_begun = True
                self._begin()

    def _begin(self) -> None:
        arguments = [str(_PROGRAM), str(self.path), str(os.getpid()), str(began(os.getpid())), json.dumps(sys.path)]
        with open(os.devnull, "rb") as nothing:
            silent = nothing.fileno()
            redirected = [(os.POSIX_SPAWN_DUP2, silent, 0), (os.POSIX_SPAWN_DUP2, self._screen, 2)]
            command = [sys.executable, "-I", "-S", *arguments]
            # Not by subprocess: its hook would take this program for a process of the test's.
            with without_child_handler(), contextlib.suppress(ChildProcessError):  # where SIGCHLD is ignored
                pid = os.posix_spawn(
                    sys.executable, command, {}, file_actions=[*redirected, (os.POSIX_SPAWN_DUP2, 2, 1)]
                )
                os.waitpid(pid, 0)  # it forks, and ends

    def close(self) -> None:
        """Close the terminal; the program ends when its folder is deleted."""
        os.close(self._screen)
