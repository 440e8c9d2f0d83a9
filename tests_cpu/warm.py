"""pytest in a fork of a process that has imported torch: each of the suite's runs on an example saves that second.

The fork runs pytest from its start, with its own working directory, environment and output. A run that must not find
torch imported has a process of its own (the mark ``own_python``).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pytest_nsa.system.prctl import die_with
from pytest_nsa.wire.messages import Channel


class WarmPython:
    """The warm process: started on first use, ended with this process."""

    def __init__(self) -> None:
        self._channel: Channel | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, folder: Path, arguments: Sequence[str], timeout: float) -> pytest.RunResult:
        """Run pytest as `pytest_nsa.testing.start_pytest` does."""
        uses_hypothesis = any("hypothesis" in f.read_text(errors="replace") for f in folder.glob("test_*.py"))
        # hypothesis' plugin imports all of hypothesis at the end of every session, another second; anyio's, all of asyncio.
        without = ["-p", "no:anyio", *([] if uses_hypothesis else ["-p", "no:hypothesispytest"])]
        code, out, err = self.run_program("pytest", folder, [*without, *arguments], timeout)
        return pytest.RunResult(code, out.splitlines(), err.splitlines(), 0)

    def run_program(
        self, program: str, folder: Path, arguments: Sequence[str], timeout: float, variables: Mapping[str, str] = {}
    ) -> tuple[int, str, str]:
        """Return exit code, output and errors of pytest or of a module's ``main``. Raise subprocess.TimeoutExpired."""
        channel = self._started()
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            fds = [out.fileno(), err.fileno()]
            env = {k: v for k, v in {**os.environ, **variables}.items() if k != "PYTHONDONTWRITEBYTECODE"}
            request = {"program": program, "cwd": str(folder), "arguments": list(arguments), "env": env}
            socket.send_fds(channel.socket, [json.dumps(request).encode() + b"\n"], fds)
            told = self._hear(channel, [], 1, 60)
            told = self._hear(channel, told, 2, timeout)
            if len(told) < 2:
                os.kill(told[0]["pid"], signal.SIGKILL)  # it is not reaped before its end was read
                self._hear(channel, told, 2, 60)
                raise subprocess.TimeoutExpired(program, timeout)
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode(errors="replace"))
        print(*texts, sep="\n")  # for the report of a test that fails
        return told[1]["code"], texts[0], texts[1]

    @staticmethod
    def _hear(channel: Channel, told: list[dict[str, Any]], count: int, timeout: float) -> list[dict[str, Any]]:
        """Return ``told`` with the messages that arrive, until there are ``count`` or none has come for ``timeout`` seconds.

        Raise RuntimeError when the process has gone.
        """
        while len(told) < count:
            found = channel.receive(timeout)
            if channel.closed:
                raise RuntimeError("the warm interpreter has gone")
            if not found:
                break
            told = [*told, *found]
        return told

    def _started(self) -> Channel:
        if self._channel is None:
            ours, theirs = socket.socketpair()
            parent = os.getpid()
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("warm_server.py")), str(theirs.fileno())],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, preexec_fn=lambda: die_with(parent),
                env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            )  # fmt: skip
            theirs.close()
            self._channel = Channel(ours)
        return self._channel

    def close(self) -> None:
        """End the process."""
        if self._channel is not None and self._process is not None:
            self._channel.shut_down()
            self._process.wait()
