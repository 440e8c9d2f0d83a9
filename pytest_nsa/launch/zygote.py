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
from dataclasses import dataclass
from typing import Any

import pytest

from pytest_nsa.launch.messages import Channel, Job, plain_nodeid
from pytest_nsa.launch.parent import die_with, kill_group

# What DDP, FSDP and optimizers import on first use: seconds in each rank, unless the zygote has them already.
PRELOAD = (
    "torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo", "torch.distributed.fsdp",
    "torch.distributed.device_mesh", "nsa.trace.session",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rank:
    """A forked rank that has not been reaped, and the number of the job that it belongs to."""

    job: int
    rank: int


class Zygote:
    """Serves the host at the other end of a socket; returns from `serve` when that has gone."""

    def __init__(self, items: dict[str, pytest.Item], sock: socket.socket) -> None:
        self.items = items
        self.host = Channel(sock)
        self.ranks: dict[int, Rank] = {}  # by pid

    def serve(self) -> None:
        """Preload, say that we are ready, and fork ranks until the host has closed its end."""
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._preload()
        gc.collect()
        gc.freeze()  # pages that no collection touches stay shared with the ranks
        self.host.send(op="ready")
        while not self.host.closed:
            sources: list[Any] = [wake_read, self.host.socket]
            readable, _, _ = select.select(sources, [], [])
            if wake_read in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake_read, 4096)
                self._reap()
            if self.host.socket in readable:
                for message in self.host.receive(0):
                    self._handle(message)
        for pid in self.ranks:
            kill_group(pid)
            os.waitpid(pid, 0)

    def _preload(self) -> None:
        for module in PRELOAD:
            importlib.import_module(module)
        import torch

        torch.set_num_threads(1)

    def _handle(self, message: dict[str, Any]) -> None:
        if message["op"] == "run":
            self._start(message["number"], Job.from_json(message["job"]))
            return
        for pid, rank in self.ranks.items():
            if rank.job != message["number"]:
                continue
            if message["op"] == "kill":
                kill_group(pid)
            elif message["op"] == "signal" and rank.rank == message["rank"]:
                os.kill(pid, message["signal"])

    def _start(self, number: int, job: Job) -> None:
        from pytest_nsa.launch import rank as rank_module

        try:
            run = rank_module.prepare(job, self.items)
        except LookupError as error:
            self.host.send(op="refused", number=number, reason=str(error))
            return
        parent = os.getpid()
        pids = []
        for rank in range(job.world_size):
            pid = os.fork()
            if pid == 0:
                self._become_rank(parent, rank, job, run)
            self.ranks[pid] = Rank(number, rank)
            pids.append(pid)
        self.host.send(op="started", number=number, pids=pids)

    def _become_rank(self, parent: int, rank: int, job: Job, run: Any) -> None:
        """Never returns: whatever happens, the child must not go on as a zygote."""
        code = 70
        try:
            die_with(parent)
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self.host.socket.close()
            from pytest_nsa.launch import rank as rank_module

            code = rank_module.main(rank, job, run)
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        """Report each rank that has ended, and end what it left running."""
        for pid, rank in list(self.ranks.items()):
            # Looked at before it is reaped: until then neither its pid nor its process group can be anybody else's.
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            kill_group(pid)
            _, status = os.waitpid(pid, 0)
            del self.ranks[pid]
            self.host.send(op="exited", number=rank.job, rank=rank.rank, status=status)


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
