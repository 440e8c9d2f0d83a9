"""Where ranks come from: a forked zygote, a clean child pytest as zygote, or a cold interpreter a rank."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pytest_nsa.artifacts import write_atomically
from pytest_nsa.launch.host import Launcher, LaunchError
from pytest_nsa.launch.messages import Channel, Job
from pytest_nsa.launch.parent import die_with
from pytest_nsa.settings import COLD_JOB, ZYGOTE_FD, Settings, child_environment
from pytest_nsa.watch.process import native_threads

READY_S = 300.0


class ZygoteLauncher:
    """Asks a zygote at the other end of a socket pair. ``pid`` is the zygote's."""

    def __init__(self, channel: Channel, pid: int, description: str, log: Path | None) -> None:
        self.channel, self.pid, self.description, self.log = channel, pid, description, log
        self._ready = False
        self._exits: dict[int, int] = {}

    def start(self, job: Job) -> list[int]:
        self._wait_until_ready()
        self._exits = {}
        self.channel.send(op="run", job=job.to_json())
        while True:
            for message in self._receive(READY_S):
                if message["op"] == "started":
                    return message["pids"]
                if message["op"] == "refused":
                    raise LaunchError(message["reason"])

    def exits(self, timeout: float) -> dict[int, int]:
        if not self._exits:
            self._receive(timeout)
        found, self._exits = self._exits, {}
        return found

    def signal(self, rank: int, number: int) -> None:
        self.channel.send(op="signal", rank=rank, signal=number)

    def kill(self) -> None:
        self.channel.send(op="kill")

    def close(self) -> None:
        self.channel.close()  # the zygote kills its ranks and ends when its last host has gone
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_S
        while not self._ready:
            messages = self._receive(max(0.0, deadline - time.monotonic()))
            self._ready = any(m["op"] == "ready" for m in messages)
            if not self._ready and time.monotonic() >= deadline:
                raise LaunchError(f"the zygote was not ready within {READY_S:.0f} s{self._log_tail()}")

    def _receive(self, timeout: float) -> list[dict[str, Any]]:
        messages = self.channel.receive(timeout)
        for message in messages:
            if message["op"] == "exited":
                self._exits[message["rank"]] = message["status"]
        if self.channel.closed:
            raise LaunchError(f"the process that starts the ranks has ended{self._log_tail()}")
        return messages

    def _log_tail(self) -> str:
        if self.log is None or not self.log.is_file():
            return ""
        lines = self.log.read_text(errors="replace").splitlines()
        return f"; its last words ({self.log}):\n" + "\n".join(lines[-15:])


class ColdLauncher:
    """A new interpreter a rank, which collects the tests again: slow, and free of whatever this process has done."""

    description = "cold: a new interpreter a rank"

    def __init__(self, config: pytest.Config, arguments: list[str]) -> None:
        self.cwd = config.invocation_params.dir
        self.arguments = arguments
        self._ranks: dict[int, subprocess.Popen[bytes]] = {}
        self._reported: set[int] = set()

    def start(self, job: Job) -> list[int]:
        self._ranks, self._reported = {}, set()
        parent = os.getpid()

        def in_child() -> None:
            os.setpgid(0, 0)
            die_with(parent)

        for rank in range(job.world_size):
            folder = job.rank_folder(rank)
            folder.mkdir(exist_ok=True)
            spec = folder / "cold.json"
            write_atomically(spec, json.dumps({"rank": rank, "job": job.to_json()}))
            with (folder / "output.log").open("ab") as log:
                self._ranks[rank] = subprocess.Popen(
                    [sys.executable, "-m", "pytest", *self.arguments], cwd=self.cwd, stdin=subprocess.DEVNULL, stdout=log,
                    stderr=log, env=child_environment(**{COLD_JOB: str(spec)}), preexec_fn=in_child,
                )  # fmt: skip
        return [process.pid for process in self._ranks.values()]

    def exits(self, timeout: float) -> dict[int, int]:
        deadline = time.monotonic() + timeout
        while True:
            found = {}
            for rank, process in self._ranks.items():
                code = process.poll()
                if code is not None and rank not in self._reported:
                    self._reported.add(rank)
                    found[rank] = -code if code < 0 else code << 8
            if found or time.monotonic() >= deadline:
                return found
            time.sleep(0.02)

    def signal(self, rank: int, number: int) -> None:
        if self._ranks[rank].poll() is None:
            self._ranks[rank].send_signal(number)

    def kill(self) -> None:
        for process in self._ranks.values():
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        for process in self._ranks.values():
            process.wait()


def why_not_fork(config: pytest.Config) -> str:
    """'' when forking this process is safe, else the reason that it is not."""
    if hasattr(config, "workerinput"):
        return "an xdist worker has threads of its own"
    others = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
    if others:
        return f"other threads run here ({', '.join(others[:3])})"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "CUDA is initialised in this process"
    if any(state not in "SI" for state in native_threads()):
        return "native threads are busy in this process"
    return ""


def choose(config: pytest.Config, settings: Settings, session: pytest.Session, log: Path) -> Launcher:
    """The launcher that ``--nsa-launch`` asks for; auto forks when that is safe."""
    arguments = _child_arguments(config, log)
    if settings.launch == "cold":
        return ColdLauncher(config, arguments)
    reason = why_not_fork(config)
    if settings.launch == "fork" and reason:
        raise pytest.UsageError(f"--nsa-launch=fork: {reason}; use --nsa-launch=clean")
    if settings.launch == "clean" or reason:
        return _clean_zygote(config, arguments, log, reason or "asked for")
    return _forked_zygote(session, log)


def _forked_zygote(session: pytest.Session, log: Path) -> ZygoteLauncher:
    from pytest_nsa.launch.zygote import Zygote, by_nodeid

    ours, theirs = socket.socketpair()
    for stream in (sys.__stdout__, sys.__stderr__, sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            die_with(parent)
            ours.close()
            os.setpgid(0, 0)  # Ctrl-C at the terminal is the host's
            fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(fd, 1)
            os.dup2(fd, 2)
            Zygote(by_nodeid(session.items), theirs).serve()
        except BaseException:
            import traceback

            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(0)
    theirs.close()
    return ZygoteLauncher(Channel(ours), pid, "forked from this process after collection", log)


def _clean_zygote(config: pytest.Config, arguments: list[str], log: Path, why: str) -> ZygoteLauncher:
    ours, theirs = socket.socketpair()
    parent = os.getpid()

    def in_child() -> None:
        os.setpgid(0, 0)
        die_with(parent)

    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *arguments], cwd=config.invocation_params.dir, stdin=subprocess.DEVNULL,
            stdout=output, stderr=output, pass_fds=[theirs.fileno()], preexec_fn=in_child,
            env=child_environment(**{ZYGOTE_FD: str(theirs.fileno())}),
        )  # fmt: skip
    theirs.close()
    return ZygoteLauncher(Channel(ours), process.pid, f"a clean child pytest ({why})", log)


def _child_arguments(config: pytest.Config, log: Path) -> list[str]:
    """This run's command line for a child that collects the same tests and runs them otherwise."""
    worker: dict[str, Any] = getattr(config, "workerinput", {})
    arguments = [str(a) for a in worker.get("nsa_arguments", config.invocation_params.args)]
    # The child must not touch this run's cache (it would select other tests under --lf) nor its reports.
    arguments += ["-o", f"cache_dir={log.parent / '.child_cache'}", "--junitxml="]
    if config.pluginmanager.hasplugin("xdist"):
        arguments += ["-n0"]
    return arguments
