"""A worker group: the ranks of one group, forked together by the zygote. It runs one job; ahead of it or after it, it may wait."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pytest_nsa.system.prctl import fork, kill_group
from pytest_nsa.wire.messages import Channel, GroupSpec, Job

# For ranks forked ahead to form their group, once they are wanted; fresh ones leave evidence of what is wrong.
JOIN_S = 10.0


@dataclass
class Member:
    """A rank's process, and our end of the socket pair to it."""

    rank: int
    pid: int
    control: Channel
    state: Literal["joining", "waiting", "running", "gone"] = "joining"


class KeyValues:
    """The zygote's side of a worker group's store (`rank.store`): values by key, and which ranks wait for which keys."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._waiting: list[tuple[Channel, dict[str, Any]]] = []

    def answer(self, asker: Channel, request: dict[str, Any]) -> None:
        """Answer a request, and those that waited for what it stored."""
        if not self._is_answered(asker, request):
            self._waiting.append((asker, request))
        elif self._waiting:
            self._waiting = [(a, r) for a, r in self._waiting if not self._is_answered(a, r)]

    def _is_answered(self, asker: Channel, request: dict[str, Any]) -> bool:
        """Answer now, if nothing has to be waited for."""
        keys = {"wait": request.get("keys", ()), "get": (request.get("key"),)}.get(request["call"], ())
        if not all(key in self._values for key in keys):
            return False
        asker.send(id=request["id"], value=self._call(request))
        return True

    def _call(self, request: dict[str, Any]) -> Any:
        values, call, key = self._values, request["call"], request.get("key", "")
        if call == "set":
            values[key] = request["value"]
        elif call == "get":
            return values[key]
        elif call == "add":
            values[key] = str(int(values.get(key, "0")) + request["amount"])
            return int(values[key])
        elif call == "compare_set":
            if values.get(key, "") == request["expected"]:
                values[key] = request["desired"]
            return values.get(key, request["expected"])
        elif call == "check":
            return all(k in values for k in request["keys"])
        elif call == "delete":
            return values.pop(key, None) is not None
        elif call == "count":
            return len(values)
        return None


@dataclass
class WorkerGroup:
    """Its members by pid. ``number`` is that of the job it runs, or is to run once its members have joined their group."""

    spec: GroupSpec
    store: Path  # where torch's own store lies, for a backend that queries it from its own threads
    held: list[socket.socket] = field(default_factory=list)  # ports, for groups that the test makes itself
    members: dict[int, Member] = field(default_factory=dict)
    number: int | None = None
    pending: Job | None = None
    pending_since: float = 0.0
    reuse: str = ""
    is_doomed: bool = False
    values: KeyValues = field(default_factory=KeyValues)

    def fork(self, become: Callable[[int, Channel], None], job: Job | None) -> None:
        """Fork every rank; in each, ``become(rank, control)`` must never return. ``job`` is what they know from the start."""
        for rank in self.spec.local_ranks:
            ours, theirs = socket.socketpair()
            pid = fork()
            if pid == 0:
                ours.close()
                for member in self.members.values():
                    member.control.socket.close()
                become(rank, Channel(theirs))
            theirs.close()
            self.members[pid] = Member(rank, pid, Channel(ours), "joining" if job is None else "running")

    @property
    def pids(self) -> list[int]:
        """By rank."""
        return [m.pid for m in sorted(self.members.values(), key=lambda m: m.rank)]

    @property
    def is_whole(self) -> bool:
        """Whether every rank is there, and none is about to end."""
        return (
            not self.is_doomed
            and len(self.members) == len(self.spec.local_ranks)
            and all(m.state != "gone" for m in self.members.values())
        )

    @property
    def is_waiting(self) -> bool:
        """Whether every rank waits for a job."""
        return self.is_whole and all(m.state == "waiting" for m in self.members.values())

    @property
    def is_late(self) -> bool:
        """Whether a job has waited too long for ranks that do not come."""
        return self.pending is not None and time.monotonic() - self.pending_since > JOIN_S

    def fits(self, job: Job) -> bool:
        """Return whether ``job`` may run here: ranks that stayed serve only their own class or module."""
        return self.is_whole and self.spec == job.group_spec and self.reuse in ("", job.reuse)

    def assign(self, number: int, job: Job) -> None:
        """Send every rank its job."""
        # Ranks that will not stay serve no other test, though they are there until they have ended.
        self.number, self.reuse, self.pending = number, job.reuse if job.stay else "", None
        for member in self.members.values():
            member.state = "running"
            member.control.send(op="job", job=job.to_json())

    def signal(self, rank: int, number: int) -> None:
        """Signal one rank. Not reaped yet, so the pid is its own."""
        for member in self.members.values():
            if member.rank == rank and member.state != "gone":
                os.kill(member.pid, number)

    def kill(self) -> None:
        """SIGKILL every rank that is still there, and what it started."""
        self.is_doomed = True
        for member in self.members.values():
            if member.state != "gone":
                kill_group(member.pid)

    def clean_up(self) -> None:
        """Close sockets and remove the store's file, once no rank is left."""
        for member in self.members.values():
            member.control.shut_down()
        for holder in self.held:
            holder.close()
        with contextlib.suppress(OSError):
            shutil.rmtree(self.store.parent)
