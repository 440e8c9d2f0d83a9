"""A worker group: the ranks of one group, forked together by the zygote. It runs a job; before or after it, it may wait for one."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pytest_nsa.system.clock import monotonic
from pytest_nsa.system.prctl import fork, kill_group
from pytest_nsa.wire.messages import Channel, GroupSpec, Job

# For ranks forked ahead to form their group, once a job needs them; after it, new ranks are forked, which leave evidence.
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
        """Answer a request, and the requests that waited for a value that it stores."""
        if not self._try_answer(asker, request):
            self._waiting.append((asker, request))
        elif self._waiting:
            self._waiting = [(a, r) for a, r in self._waiting if not self._try_answer(a, r)]

    def _try_answer(self, asker: Channel, request: dict[str, Any]) -> bool:
        """Answer a request if all its keys have values; return whether it was answered."""
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
        """Fork every rank; in each, ``become(rank, control)`` must never return. ``job``: None if they receive it later."""
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
        """The process ids, in the order of the ranks."""
        return [m.pid for m in sorted(self.members.values(), key=lambda m: m.rank)]

    @property
    def is_whole(self) -> bool:
        """Whether every rank lives, and none is being killed."""
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
        """Whether a job has waited too long for the ranks to join their group."""
        return self.pending is not None and monotonic() - self.pending_since > JOIN_S

    def fits(self, job: Job) -> bool:
        """Return whether ``job`` may run here: ranks that stayed serve only their own class or module."""
        return self.is_whole and self.spec == job.group_spec and self.reuse in ("", job.reuse)

    def assign(self, number: int, job: Job) -> None:
        """Send every rank its job."""
        # Ranks that do not stay serve no other test, though they live until they have ended.
        self.number, self.reuse, self.pending = number, job.reuse if job.stay else "", None
        for member in self.members.values():
            member.state = "running"
            member.control.send(op="job", job=job.to_json())

    def signal(self, rank: int, number: int) -> None:
        """Signal one rank. It is not reaped yet, so no other process has its pid."""
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
