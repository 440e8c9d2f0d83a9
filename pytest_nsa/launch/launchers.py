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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from pytest_nsa.artifacts import write_atomically
from pytest_nsa.launch.host import Launcher, LaunchError
from pytest_nsa.launch.messages import Channel, Job
from pytest_nsa.launch.parent import die_with, kill_group
from pytest_nsa.settings import COLD_JOB, ZYGOTE_FD, Settings, child_environment
from pytest_nsa.watch.process import native_threads

READY_S = 300.0  # for the imports of torch on a busy machine
START_S = 60.0
CLOSE_S = 3.0


class ZygoteLauncher:
    """Asks a zygote at the other end of a socket pair. ``pid`` is the zygote's, a child of this process."""

    def __init__(self, channel: Channel, pid: int, log: Path) -> None:
        self.channel, self.pid, self.log = channel, pid, log
        self._ready = False
        self._number = 0  # of the job: what a rank of an earlier one still says is not about this one
        self._exits: dict[int, int] = {}

    def start(self, job: Job) -> list[int]:
        self._wait_until_ready()
        self._exits = {}
        self._number += 1
        self.channel.send(op="run", number=self._number, job=job.to_json())
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            for message in self._receive(max(0.0, deadline - time.monotonic())):
                if message["op"] == "started":
                    return message["pids"]
                if message["op"] == "refused":
                    raise LaunchError(message["reason"])
        raise LaunchError(f"the zygote forked no ranks within {START_S:.0f} s{self._log_tail()}")

    def exits(self, timeout: float) -> dict[int, int]:
        if not self._exits:
            self._receive(timeout)
        found, self._exits = self._exits, {}
        return found

    def signal(self, rank: int, number: int) -> None:
        self.channel.send(op="signal", number=self._number, rank=rank, signal=number)

    def kill(self) -> None:
        self.channel.send(op="kill", number=self._number)

    def close(self) -> None:
        # Shut down, not only closed: a process that the host forked may hold the socket open.
        self.channel.shut_down()
        deadline = time.monotonic() + CLOSE_S
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(self.pid, os.WNOHANG) == (0, 0):
                if time.monotonic() >= deadline:
                    os.kill(self.pid, signal.SIGKILL)  # its ranks die with it
                    os.waitpid(self.pid, 0)
                    return
                time.sleep(0.002)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_S
        while not self._ready:
            messages = self._receive(max(0.0, deadline - time.monotonic()))
            self._ready = any(m["op"] == "ready" for m in messages)
            if not self._ready and time.monotonic() >= deadline:
                raise LaunchError(f"the zygote was not ready within {READY_S:.0f} s{self._log_tail()}")

    def _receive(self, timeout: float) -> list[dict[str, Any]]:
        messages = [m for m in self.channel.receive(timeout) if m.get("number", self._number) == self._number]
        for message in messages:
            if message["op"] == "exited":
                self._exits[message["rank"]] = message["status"]
        if self.channel.closed:
            raise LaunchError(f"the process that starts the ranks has ended{self._log_tail()}")
        return messages

    def _log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.is_file() else []
        return f"; its last words ({self.log}):\n" + "\n".join(lines[-15:]) if lines else ""


class ColdLauncher:
    """A new interpreter a rank, which collects the tests again: slow, and free of whatever this process has done."""

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
                if rank in self._reported:
                    continue
                if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                    continue
                kill_group(process.pid)  # before it is reaped: what it left running is still in its group
                code = process.wait()
                self._reported.add(rank)
                found[rank] = -code if code < 0 else code << 8
            if found or time.monotonic() >= deadline:
                return found
            time.sleep(0.02)

    def signal(self, rank: int, number: int) -> None:
        if rank not in self._reported:
            os.kill(self._ranks[rank].pid, number)  # not reaped yet, so the pid is its own

    def kill(self) -> None:
        for rank, process in self._ranks.items():
            if rank not in self._reported:
                kill_group(process.pid)

    def close(self) -> None:
        self.kill()
        self.exits(CLOSE_S)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchPlan:
    """Where ranks will come from, and that in words for the header."""

    kind: Literal["fork", "clean", "cold"]
    description: str


def plan(config: pytest.Config, settings: Settings) -> LaunchPlan:
    """What ``--nsa-launch`` asks for; auto forks this process when that is safe. UsageError when fork is not."""
    if settings.launch == "cold":
        return LaunchPlan(kind="cold", description="cold: a new interpreter a rank")
    reason = why_not_fork(config)
    if settings.launch == "fork" and reason:
        raise pytest.UsageError(f"--nsa-launch=fork: {reason}; use --nsa-launch=clean")
    if settings.launch == "clean" or reason:
        return LaunchPlan(kind="clean", description=f"forked from a clean child pytest ({reason or 'asked for'})")
    return LaunchPlan(kind="fork", description="forked from this process after collection")


def start(kind: str, config: pytest.Config, session: pytest.Session, log: Path) -> Launcher:
    """Start a launcher of the planned kind."""
    if kind == "fork":
        return _forked_zygote(session, log)
    arguments = _child_arguments(config, log)
    return ColdLauncher(config, arguments) if kind == "cold" else _clean_zygote(config, arguments, log)


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
    return ZygoteLauncher(Channel(ours), pid, log)


def _clean_zygote(config: pytest.Config, arguments: list[str], log: Path) -> ZygoteLauncher:
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
    return ZygoteLauncher(Channel(ours), process.pid, log)


def _child_arguments(config: pytest.Config, log: Path) -> list[str]:
    """This run's command line for a child that collects the same tests and runs them otherwise."""
    worker: dict[str, Any] = getattr(config, "workerinput", {})
    arguments = [str(a) for a in worker.get("nsa_arguments", config.invocation_params.args)]
    # The child must not touch this run's cache (it would select other tests under --lf) nor its reports.
    arguments += ["--junitxml="]
    if config.pluginmanager.hasplugin("cacheprovider"):
        arguments += ["-o", f"cache_dir={log.parent / '.child_cache'}"]
    if config.pluginmanager.hasplugin("xdist"):
        arguments += ["-n0"]
    return arguments
