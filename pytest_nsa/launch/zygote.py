"""The zygote: a process with every test collected and torch loaded, which forks the ranks of each test.

It is either a fork of the pytest process, made right after collection, or a clean child pytest that collected the
same tests (`ServeSession`). It runs no test itself, so every rank starts from the same untouched state.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

from pytest_nsa.launch.messages import Channel, Job, plain_nodeid
from pytest_nsa.launch.parent import die_with

# What DDP, FSDP and optimizers import on first use: seconds in each rank, unless the zygote has them already.
PRELOAD = (
    "torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo", "torch.distributed.fsdp",
    "torch.distributed.device_mesh", "nsa.trace.session",
)  # fmt: skip


@dataclass
class Rank:
    """A forked rank that has not been reaped."""

    rank: int
    pid: int
    client: Channel = field(repr=False)


class Zygote:
    """Serves jobs to the hosts that are connected; returns from `serve` when the last has gone."""

    def __init__(self, items: dict[str, pytest.Item], first: socket.socket) -> None:
        self.items = items
        self.clients = [Channel(first)]
        self.ranks: dict[int, Rank] = {}  # by pid

    def serve(self) -> None:
        """Preload, say that we are ready, and fork ranks until every host has closed its end."""
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._preload()
        gc.collect()
        gc.freeze()  # pages that no collection touches stay shared with the ranks
        for client in self.clients:
            client.send(op="ready", pid=os.getpid())
        while self.clients:
            sources: list[Any] = [wake_read, *self.clients]
            readable, _, _ = select.select(sources, [], [])
            if wake_read in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake_read, 4096)
                self._reap()
            for client in [c for c in self.clients if c in readable]:
                for message in client.receive(0):
                    self._handle(client, message)
                if client.closed:
                    self._kill(client)
                    self.clients.remove(client)
        for pid in self.ranks:
            _kill_group(pid)
            os.waitpid(pid, 0)

    def _preload(self) -> None:
        for module in PRELOAD:
            importlib.import_module(module)
        import torch

        torch.set_num_threads(1)

    def _handle(self, client: Channel, message: dict[str, Any]) -> None:
        if message["op"] == "run":
            self._start(client, Job.from_json(message["job"]))
        elif message["op"] == "signal":
            for rank in self._ranks_of(client):
                if rank.rank == message["rank"]:
                    os.kill(rank.pid, message["signal"])
        elif message["op"] == "kill":
            self._kill(client)

    def _start(self, client: Channel, job: Job) -> None:
        from pytest_nsa.launch import rank as rank_module

        try:
            run = rank_module.prepare(job, self.items)
        except LookupError as error:
            client.send(op="refused", reason=str(error))
            return
        parent = os.getpid()
        pids = []
        for number in range(job.world_size):
            pid = os.fork()
            if pid == 0:
                self._become_rank(parent, number, job, run)
            self.ranks[pid] = Rank(number, pid, client)
            pids.append(pid)
        client.send(op="started", pids=pids)

    def _become_rank(self, parent: int, number: int, job: Job, run: Any) -> None:
        """Never returns: whatever happens, the child must not go on as a zygote."""
        code = 70
        try:
            die_with(parent)
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for client in self.clients:
                client.socket.close()
            from pytest_nsa.launch import rank as rank_module

            code = rank_module.main(number, job, run)
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _ranks_of(self, client: Channel) -> list[Rank]:
        return [rank for rank in self.ranks.values() if rank.client is client]

    def _kill(self, client: Channel) -> None:
        for rank in self._ranks_of(client):
            _kill_group(rank.pid)

    def _reap(self) -> None:
        """Report each rank that has ended, and end what it left running."""
        for pid, rank in list(self.ranks.items()):
            # Looked at before it is reaped: until then neither its pid nor its process group can be anybody else's.
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            _kill_group(pid)
            _, status = os.waitpid(pid, 0)
            del self.ranks[pid]
            rank.client.send(op="exited", rank=rank.rank, status=status)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):  # in the moment before it has made its own group
        os.kill(pid, signal.SIGKILL)


def by_nodeid(items: Iterable[pytest.Item]) -> dict[str, pytest.Item]:
    """Items by their id, without the '@group' that xdist appends."""
    return {plain_nodeid(item.nodeid): item for item in items}


class ServeSession:
    """Registered in a clean child pytest: after collection it serves as the zygote instead of running tests."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        die_with(os.getppid())
        # A child cannot speak to the terminal: what it collected is in the hosts' hands already.
        Zygote(by_nodeid(session.items), socket.socket(fileno=self.fd)).serve()
        return True
