"""pytest and other programs in forks of a process that has imported torch: each saves the two seconds of that import.

A fork runs its program from its start, with its own working directory, environment and output; with a nursery, what the program
starts is such a fork, too. A run that must not find torch imported has a process of its own (the mark ``own_python``), and so has
what is found by its environment or command line in /proc: a fork has those of the process that forks.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pytest_nsa.system.prctl import die_with
from pytest_nsa.wire.messages import Channel

# Plugins of the extra `test` that cost each session up to a second, at their import or at its end.
WITHOUT = [
    option
    for name in (
        "anyio", "hypothesispytest", "randomly", "syrupy", "inline_snapshot", "dependency", "pytest-retry", "pytest_reportlog",
        "allure_pytest", "pytest_forked",
    )
    for option in ("-p", f"no:{name}")
]  # fmt: skip


class WarmPython:
    """The warm process: started on first use, ended with this process."""

    def __init__(self) -> None:
        self._channel: Channel | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._forked: list[int] = []
        self._codes: dict[int, int] = {}

    def run(self, folder: Path, arguments: Sequence[str], timeout: float) -> pytest.RunResult:
        """Run pytest as `pytest_nsa.testing.start_pytest` does."""
        # Not pipes: a process that the session leaves may hold them open.
        with (
            tempfile.TemporaryFile("w+", errors="replace") as out,
            tempfile.TemporaryFile("w+", errors="replace") as err,
        ):
            code = self.call("-m", "pytest", *arguments, cwd=folder, timeout=timeout, stdout=out, stderr=err).returncode
            texts = [file.read() for file in (out, err) if file.seek(0) == 0]
        print(*texts, sep="\n")  # for the report of a test that fails
        return pytest.RunResult(code, texts[0].splitlines(), texts[1].splitlines(), 0)

    def fork(self, fds: list[int], environment: Mapping[str, str], **request: Any) -> int:
        """Start a process with ``fds`` as output, errors and input; return its id. Raise RuntimeError where none starts."""
        channel = self._started()
        request["fds"] = [1, 2, 0][: len(fds)]
        env = {k: v for k, v in environment.items() if k != "PYTHONDONTWRITEBYTECODE"}
        socket.send_fds(channel.socket, [json.dumps({**request, "env": env}).encode() + b"\n"], fds)
        while not self._forked:
            if not self._hear(60):
                raise RuntimeError("the warm interpreter starts no process")
        return self._forked.pop()

    def code_of(self, pid: int, timeout: float | None) -> int | None:
        """Return the exit code of a process; None when it has not ended after ``timeout`` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while pid not in self._codes:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._hear(left):
                return None
        return self._codes[pid]

    def _hear(self, timeout: float | None) -> bool:
        """Take what has been reported; return whether anything was. Raise RuntimeError when the warm process has gone."""
        channel = self._started()
        found = channel.receive(timeout)
        for message in found:
            if "code" in message:
                self._codes[message["pid"]] = message["code"]
            else:
                self._codes.pop(message["pid"], None)  # of a process before, which had the same id
                self._forked.append(message["pid"])
        if channel.closed and not found:
            raise RuntimeError("the warm interpreter has gone")
        return bool(found)

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

    def popen(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        """Start ``python ARGUMENTS``, given as -m MODULE, -c CODE or a file, as `subprocess.Popen` does with ``options``.

        Its sessions of pytest run without the plugins of `WITHOUT` that their command line does not name.
        With ``nursery=True`` each Python that it starts is a fork with torch imported, too, and each that those start.
        """
        variables = dict(options.pop("env", None) or os.environ)
        variables["PYTEST_ADDOPTS"] = " ".join([*WITHOUT, variables.get("PYTEST_ADDOPTS", "")])
        return _Forked(self, [sys.executable, *arguments], **{"text": True, "env": variables, **options})

    def call(
        self, *arguments: str, typed: str | None = None, timeout: float = 120, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run ``python ARGUMENTS`` as `subprocess.run` does, with ``typed`` as input; output and errors are kept by default."""
        given = subprocess.DEVNULL if typed is None else subprocess.PIPE
        options = {"stdin": given, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        with self.popen(*arguments, **options) as process:
            try:
                out, err = process.communicate(typed, timeout)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


class _Forked(subprocess.Popen[str]):
    """A process that the warm process forks: what `subprocess.Popen` does but for the start and the wait."""

    def __init__(self, warm: WarmPython, *arguments: Any, nursery: bool = False, **options: Any) -> None:
        self._warm, self._nursery = warm, nursery
        super().__init__(*arguments, **options)

    def _execute_child(  # type: ignore[override]
        self, args: list[str], executable: Any, preexec_fn: Any, close_fds: bool, pass_fds: Any, cwd: Any, env: Any,
        startupinfo: Any, creationflags: Any, shell: Any, p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int,
        errread: int, errwrite: int, restore_signals: bool, gid: Any, gids: Any, uid: Any, umask: int,
        start_new_session: bool, *rest: Any,
    ) -> None:  # fmt: skip
        fds = [
            1 if c2pwrite == -1 else c2pwrite,
            2 if errwrite == -1 else errwrite,
            *([] if p2cread == -1 else [p2cread]),
        ]
        try:
            self.pid = self._warm.fork(
                fds,
                os.environ if env is None else env,
                python=args[1:],
                cwd=str(cwd or os.getcwd()),
                session=start_new_session,
                nursery=self._nursery,
            )
            self._child_created = True
        finally:
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None:
            self.returncode = self._warm.code_of(self.pid, 0)  # type: ignore[assignment]
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self.returncode is None:
            code = self._warm.code_of(self.pid, timeout)
            if code is None:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = code
        return self.returncode
