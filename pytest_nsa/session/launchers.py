"""The host's two ways to ranks: request them from a zygote, or start a cold interpreter each; the arguments of a child pytest."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from pytest_nsa.rank import coverage
from pytest_nsa.rank.host_plugins import find_origin, is_installed
from pytest_nsa.settings import COLD_JOB, child_environment, named_plugins
from pytest_nsa.system.clock import monotonic
from pytest_nsa.system.descendants import kill_dead_ranks_groups, reap
from pytest_nsa.system.prctl import die_with, kill_group
from pytest_nsa.system.sockets import hold_ports, list_numbers
from pytest_nsa.wire.files import open_to_append, write_atomically
from pytest_nsa.wire.messages import Channel, GroupSpec, Job
from pytest_nsa.wire.protocols import Launcher, LaunchError, UnfitError

ADDOPTS = "PYTEST_ADDOPTS"
# In the name of an option that names a file to write, or requests one.
_WRITES = re.compile(
    r"report|html|xml|json|csv|alluredir|log-?file|pastebin"
    r"|(?:^|-)(?:debug|dump|export|out|outfile|output|result|resultlog|results|save|autosave|store)(?:-|$)"
)


def child_arguments(config: pytest.Config, log: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command line of a child that collects the same tests as this run, and variables of its environment.

    The child repeats no option that writes: it would empty a file that this process writes to. The options of the repository under
    test are repeated, as its tests may read them.
    """
    worker: dict[str, Any] = getattr(config, "workerinput", {})
    writing = _writing_options(config)
    arguments = _without([str(a) for a in worker.get("nsa_arguments", config.invocation_params.args)], writing)
    added = list(config.getini("addopts"))
    if _without(added, writing) != added:
        arguments = ["-o", f"addopts={shlex.join(_without(added, writing))}", *arguments]
    # The child must not touch this run's cache: it would select other tests under --lf.
    if config.pluginmanager.hasplugin("cacheprovider"):
        arguments += ["-o", f"cache_dir={log.parent / '.child_cache'}"]
    if config.pluginmanager.hasplugin("xdist"):
        arguments += ["-n0"]
    if config.pluginmanager.hasplugin("randomly"):
        arguments += [f"--randomly-seed={config.getoption('randomly_seed')}"]
    if config.pluginmanager.hasplugin("pytest_cov"):
        arguments += ["--no-cov"]  # its reports are the host's; what ranks run is measured all the same
    given = os.environ.get(ADDOPTS, "")
    return arguments, {ADDOPTS: shlex.join(_without(shlex.split(given), writing))} if given else {}


def _writing_options(config: pytest.Config) -> dict[str, bool]:
    """Return the options of pytest and of installed plugins that write, and whether each takes a value."""
    _, in_ranks = named_plugins(config)
    found: dict[str, bool] = {}
    for implementation in config.hook.pytest_addoption.get_hookimpls():
        plugin = implementation.plugin
        origin, name = find_origin(config, plugin), config.pluginmanager.get_name(plugin)
        if {origin, name} & {"pytest_nsa", *in_ranks} or not is_installed(config, plugin):
            continue
        given = {"parser": (declared := _Declared()), "pluginmanager": config.pluginmanager}
        implementation.function(*(given[name] for name in implementation.argnames))
        found |= dict(declared.writing())
    return found


class _Declared:
    """What a plugin's `pytest_addoption` declares: it takes the place of pytest's parser, and of a group of options."""

    def __init__(self) -> None:
        self._options: list[tuple[tuple[str, ...], Mapping[str, Any]]] = []

    def addoption(self, *names: str, **attributes: Any) -> None:
        """Note an option."""
        self._options.append((names, attributes))

    _addoption = addoption  # as pytest's own plugins call it

    def getgroup(self, *_: Any, **__: Any) -> _Declared:
        """Return this object for any group."""
        return self

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None  # such as addini

    def writing(self) -> Iterator[tuple[str, bool]]:
        """Yield the names of options that write, and whether they take a value."""
        for names, attributes in self._options:
            named = [*names, str(attributes.get("dest", "")), str(attributes.get("metavar", ""))]
            words = (name.strip("-").replace("_", "-").lower() for name in named)
            if isinstance(attributes.get("type"), argparse.FileType) or any(map(_WRITES.search, words)):
                takes_value = attributes.get("action", "store") in ("store", "append", "extend")
                yield from ((name, takes_value) for name in names if name.startswith("--"))


def _without(arguments: Sequence[str], writing: Mapping[str, bool]) -> list[str]:
    """Return arguments without some options, and without their values."""
    kept: list[str] = []
    follows = False  # the value of an option that was taken out
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        is_value, follows = follows and not argument.startswith("-"), False
        if name in writing:
            follows = writing[name] and not equals
        elif not is_value:
            kept.append(argument)
    return kept


READY_S = 300.0  # for the imports of torch on a busy machine
START_S = 60.0
CLOSE_S = 3.0


class ZygoteLauncher(Launcher):
    """Requests ranks from a zygote. ``pid``: the zygote's if it is a child of this process; 0 if it serves other hosts too."""

    def __init__(self, channel: Channel, pid: int, log: Path, process: subprocess.Popen[bytes] | None = None) -> None:
        self.channel, self.pid, self.log = channel, pid, log
        self._process = process
        self._ready = False
        self._number = 0  # of the job: what a rank of an earlier one still sends is not about this one
        self._exits: dict[int, int] = {}
        self._ahead: GroupSpec | None = None
        self._pids: list[int] = []
        self._began = time.clock_gettime(time.CLOCK_BOOTTIME)

    def expect(self, spec: GroupSpec | None) -> None:
        self._ahead = spec

    def start(self, job: Job) -> list[int]:
        self._exits = {}
        self._number += 1
        ahead = None if self._ahead is None else asdict(self._ahead)
        self.channel.send(op="run", number=self._number, job=job.to_json(), ahead=ahead)
        deadline = monotonic() + START_S
        while monotonic() < deadline:
            for message in self._receive(max(0.0, deadline - monotonic())):
                if message["op"] == "started":
                    self._pids = message["pids"]
                    return self._pids
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
        if not self.pid:
            return
        if self._process is not None:
            self._process.returncode = 0  # reaped below: no warning that it still runs
        reap(self.pid, CLOSE_S)  # its ranks die with it

    def wait_until_ready(self) -> None:
        deadline = monotonic() + READY_S
        while not self._ready:
            messages = self._receive(max(0.0, deadline - monotonic()))
            unfit = next((m["reason"] for m in messages if m["op"] == "unfit"), "")
            if unfit:
                raise UnfitError(unfit)
            self._ready = any(m["op"] == "ready" for m in messages)
            if not self._ready and monotonic() >= deadline:
                raise LaunchError(f"the zygote was not ready within {READY_S:.0f} s{self._log_tail()}")

    @property
    def has_ended(self) -> bool:
        if not self.channel.has_ended:
            return False
        kill_dead_ranks_groups(self._pids, self._began)
        return True

    def _receive(self, timeout: float) -> list[dict[str, Any]]:
        messages = [m for m in self.channel.receive(timeout) if m.get("number", self._number) == self._number]
        for message in messages:
            if message["op"] == "exited":
                self._exits[message["rank"]] = message["status"]
            # A finished rank has nothing more to do; that its process ends is the zygote's business.
            elif message["op"] == "finished":
                self._exits[message["rank"]] = message["code"] << 8
        if self.channel.closed:
            kill_dead_ranks_groups(self._pids, self._began)
            raise LaunchError(f"the process that starts the ranks has ended{self._log_tail()}")
        return messages

    def _log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.is_file() else []
        return f"; the end of its output ({self.log}):\n" + "\n".join(lines[-15:]) if lines else ""


def start_pytest(
    arguments: Sequence[str], cwd: Path, log: Path, variables: Mapping[str, str], pass_fds: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a child pytest that leads a process group and dies with this process. Its output is appended to ``log``.

    Its interpreter has this one's options (-O, -X dev, -W), and its environment ``variables`` too.
    """
    command = [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]
    parent = os.getpid()

    def in_child() -> None:
        os.setpgid(0, 0)
        die_with(parent)

    with open(open_to_append(log), "ab") as output:
        return subprocess.Popen(
            [*command, "-m", "pytest", *arguments], cwd=cwd, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            pass_fds=pass_fds, preexec_fn=in_child, env=child_environment(**variables, **coverage.for_child()),
        )  # fmt: skip


class ColdLauncher(Launcher):
    """A new interpreter per rank, which collects the tests again: slow, and free of whatever this process has done."""

    def __init__(self, config: pytest.Config, arguments: list[str], variables: Mapping[str, str]) -> None:
        self.cwd = config.invocation_params.dir
        self.arguments, self.variables = arguments, variables
        self._ranks: dict[int, subprocess.Popen[bytes]] = {}
        self._held: list[socket.socket] = []
        self._reported: set[int] = set()

    def start(self, job: Job) -> list[int]:
        self._ranks, self._reported = {}, set()
        self._release_ports()
        self._held = hold_ports()
        for rank in job.group_spec.local_ranks:
            folder = job.rank_folder(rank)
            folder.mkdir(exist_ok=True)
            spec = folder / "cold.json"
            write_atomically(spec, json.dumps({"rank": rank, "job": job.to_json(), "ports": list_numbers(self._held)}))
            seed = {"PYTHONHASHSEED": str(job.hash_seeds[rank])} if job.hash_seeds else {}
            variables = {**self.variables, COLD_JOB: str(spec), **seed}
            self._ranks[rank] = start_pytest(self.arguments, self.cwd, folder / "output.log", variables)
        return [process.pid for process in self._ranks.values()]

    def exits(self, timeout: float) -> dict[int, int]:
        deadline = monotonic() + timeout
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
            if found or monotonic() >= deadline:
                return found
            time.sleep(0.02)

    def signal(self, rank: int, number: int) -> None:
        if rank not in self._reported:
            os.kill(self._ranks[rank].pid, number)  # not reaped yet, so no other process has this pid

    def kill(self) -> None:
        for rank, process in self._ranks.items():
            if rank not in self._reported:
                kill_group(process.pid)

    def close(self) -> None:
        self.kill()
        self.exits(CLOSE_S)
        self._release_ports()

    def _release_ports(self) -> None:
        """Release the ports that were held for the last job's ranks."""
        for holder in self._held:
            holder.close()
        self._held = []
