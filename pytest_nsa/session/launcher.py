"""The launcher of a run: planned once (fork this process, a clean child pytest that all workers of
xdist share, or cold), started when ranks are needed, replaced when it has failed.
"""

import os
import select
import socket
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from pytest_nsa.session.folders import RunFolder
from pytest_nsa.session.launchers import ColdLauncher, ZygoteLauncher, child_arguments, start_pytest
from pytest_nsa.settings import LISTENER_FD, ZYGOTE_FD, Mode, Settings, settings_key
from pytest_nsa.system import sockets
from pytest_nsa.system.disk_space import reserve
from pytest_nsa.system.prctl import die_with, fork
from pytest_nsa.system.procfs import restless_threads
from pytest_nsa.wire.files import open_to_append
from pytest_nsa.wire.messages import Channel
from pytest_nsa.wire.protocols import Launcher, UnfitError

LOG = 64 << 10  # bytes reserved on the disk for a zygote's log


def why_not_fork(config: pytest.Config) -> str:
    """'' when forking this process is safe, else the reason that it is not."""
    if config.stash[settings_key].mode is Mode.WORKER:
        return "an xdist worker has its own threads"
    restless = restless_threads()
    if restless:
        return f"other threads run here ({', '.join(restless[:3])})"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "CUDA is initialised in this process"
    return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchPlan:
    """Where ranks will come from, and a description for the header."""

    kind: Literal["fork", "clean", "cold"]
    description: str


def plan(config: pytest.Config, settings: Settings) -> LaunchPlan:
    """Plan what ``--ranks-launch`` requests; auto forks this process when that is safe.

    Raises UsageError where fork is requested and not safe.
    """
    if settings.launch == "cold":
        return LaunchPlan(kind="cold", description="cold: a new interpreter per rank")
    here = f", rank {settings.outer.rank} of {settings.outer.world_size} here" if settings.outer is not None else ""
    reason = why_not_fork(config)
    if settings.launch == "fork" and reason:
        raise pytest.UsageError(f"--ranks-launch=fork: {reason}; use --ranks-launch=clean")
    if settings.launch == "clean" or reason:
        return LaunchPlan(kind="clean", description=f"forked from a clean child pytest ({reason or 'requested'}){here}")
    return LaunchPlan(kind="fork", description=f"forked from this process after collection{here}")


def start(kind: str, config: pytest.Config, session: pytest.Session, log: Path) -> Launcher:
    """Start a launcher of the planned kind."""
    if kind == "fork":
        return _forked_zygote(session, log)
    if kind == "cold":
        return ColdLauncher(config, *child_arguments(config, log))
    return _connect_to_shared(config, log) or _clean_zygote(config, log)


def _forked_zygote(session: pytest.Session, log: Path) -> ZygoteLauncher:
    from pytest_nsa.spawn.zygote import Zygote, by_nodeid

    reserve(log, LOG, keep_size=True)
    ours, theirs = socket.socketpair()
    for stream in (sys.__stdout__, sys.__stderr__, sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    parent = os.getpid()
    pid = fork()
    if pid == 0:
        try:
            die_with(parent)
            ours.close()
            os.setpgid(0, 0)  # Ctrl-C at the terminal is the host's
            fd = open_to_append(log)
            os.dup2(fd, 1)
            os.dup2(fd, 2)
            Zygote(by_nodeid(session.items), theirs).serve()
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(0)
    theirs.close()
    return ZygoteLauncher(Channel(ours), pid, log)


def _clean_zygote(config: pytest.Config, log: Path, listener: socket.socket | None = None) -> ZygoteLauncher:
    reserve(log, LOG, keep_size=True)  # a zygote that cannot write its log would die
    ours, theirs = socket.socketpair()
    passed = {ZYGOTE_FD: theirs.fileno(), **({LISTENER_FD: listener.fileno()} if listener is not None else {})}
    arguments, variables = child_arguments(config, log)
    variables |= {name: str(fd) for name, fd in passed.items()}
    process = start_pytest(arguments, config.invocation_params.dir, log, variables, [*passed.values()])
    theirs.close()
    return ZygoteLauncher(Channel(ours), process.pid, log, process)


class SharedZygote:
    """The xdist controller's part in a zygote for all its workers: started once a worker has connected to request ranks."""

    def __init__(self) -> None:
        self._listener = sockets.Listener("zygote")
        self.name = self._listener.name
        self._zygote: ZygoteLauncher | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether a worker waits for a zygote that has not been started."""
        return self._zygote is None and bool(select.select([self._listener.socket], [], [], 0)[0])

    def start(self, config: pytest.Config, log: Path) -> None:
        """Start the zygote; from then on it accepts the connections, not this process."""
        self._zygote = _clean_zygote(config, log, self._listener.socket)
        self._listener.socket.close()

    def close(self) -> None:
        """End it and all its ranks."""
        if self._zygote is not None:
            self._zygote.close()
        self._listener.close()


def _connect_to_shared(config: pytest.Config, log: Path) -> ZygoteLauncher | None:
    """Return a worker's connection to the shared zygote; None without one: no xdist, another machine, or it has ended."""
    name = getattr(config, "workerinput", {}).get("nsa_zygote")
    if not name:
        return None
    try:
        return ZygoteLauncher(Channel(sockets.connect(name)), 0, log)
    except OSError:
        return None


class RunLauncher:
    """The launcher of this process's tests."""

    def __init__(self, config: pytest.Config, settings: Settings, run: RunFolder) -> None:
        self.config, self.settings, self.run = config, settings, run
        self._launcher: Launcher | None = None
        self._plan: LaunchPlan | None = None
        self._cold: Launcher | None = None  # for tests that need new interpreters, where other tests do not

    @property
    def plan(self) -> LaunchPlan:
        """Where ranks come from; decided once, when collection has ended."""
        if self._plan is None:
            self._plan = plan(self.config, self.settings)
        return self._plan

    def start(self, session: pytest.Session, *, between_tests: bool = False) -> Launcher:
        """Start the launcher, unless it runs, and return it.

        This process may be forked only before the first test: inside a test, its state is no clean start for a rank.
        """
        if self._launcher is None:
            if self.plan.kind == "fork" and (not between_tests or why_not_fork(self.config)):
                self._plan = LaunchPlan(kind="clean", description="forked from a clean child pytest")
            log = self.run.room / "zygote.log"
            self._launcher = start(self.plan.kind, self.config, session, log)
        return self._launcher

    def ready(self, session: pytest.Session) -> Launcher:
        """Return the launcher once ranks can be started; that of cold ranks if collection leaves no process that may be forked."""
        if self._launcher is not None and self._launcher.has_ended:
            self.close()
            self.run.report("the process that starts the ranks was ended between two tests: another one serves since")
        launcher = self.start(session)
        try:
            launcher.wait_until_ready()
        except UnfitError as error:
            self.close()  # what has been leased for this test stays leased
            self._plan = LaunchPlan(kind="cold", description=f"cold: a new interpreter per rank ({error})")
            self.run.report(f"slow: every rank is a new interpreter, because {error}")
            launcher = self.start(session)
        return launcher

    def cold(self, session: pytest.Session) -> Launcher:
        """Return the launcher of new interpreters, and kill the ranks that stayed for another test."""
        self.kill_ranks()
        if self._cold is None:
            self._cold = start("cold", self.config, session, self.run.room / "zygote.log")
        return self._cold

    def kill_ranks(self) -> None:
        """Kill the ranks that stayed for another test, if any."""
        if self._launcher is not None:
            self._launcher.kill()

    def close(self) -> None:
        """End the launcher and everything it started."""
        if self._launcher is not None:
            self._launcher.close()
            self._launcher = None
        if self._cold is not None:
            self._cold.close()
            self._cold = None
