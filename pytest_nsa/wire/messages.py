"""What host, zygote and ranks send each other: JSON lines over a socket pair. Nothing is pickled."""

from __future__ import annotations

import contextlib
import select
import signal
import socket
from dataclasses import dataclass, field
from json import dumps, loads
from pathlib import Path
from time import CLOCK_MONOTONIC, clock_gettime  # as system.clock, which this does not import
from typing import Any

SCHEMA = 1  # of a test's folder: job.json has it, for all files of the folder that have no number
MOST_RANKS = 1 << 17
# The plugin sets these in each rank; no mark, option or hook may.
FIXED_VARIABLES = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES"})
# faulthandler in a rank answers to the first with the stacks of all threads (the newest 100), to the second with the main one's.
# Linux alone has SIGRTMIN; other systems import this, and have no ranks.
DUMP_SIGNAL, DUMP_MAIN_SIGNAL = signal.SIGUSR1, getattr(signal, "SIGRTMIN", 34) + 5
MOST_THREADS = 100


_KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,), "int": (int,), "float": (int, float), "bool": (bool,), "dict[str, Any]": (dict,), "dict[str, str]": (dict,),
    "dict[str, float]": (dict,),
    "tuple[str, ...]": (list, tuple), "tuple[int, ...]": (list, tuple), "tuple[Fact, ...]": (list, tuple),
    "tuple[Label, ...]": (list, tuple), "Outcome": (str,),
}  # fmt: skip
# Texts of a closed list: some of them become classes and colours on a page.
_CHOICES = {"Outcome": ("PASS", "FAIL", "CRASH", "HANG", "SLOW", "SKIP", "INTERRUPTED")}
_MEMBERS: dict[str, type] = {
    "tuple[str, ...]": str,
    "tuple[int, ...]": int,
    "tuple[Fact, ...]": dict,
    "tuple[Label, ...]": dict,
}


def check_kinds(of: Any, data: Any) -> None:
    """Raise ValueError if ``data``, which any program may have written, is no object, or has a field of the dataclass ``of`` with
    a value of another type.
    """
    if not isinstance(data, dict):
        raise ValueError("it holds no JSON object")
    for name, field_ in of.__dataclass_fields__.items():
        if name not in data:
            continue
        value, kind = data[name], str(field_.type)
        wanted, member = _KINDS[kind], _MEMBERS.get(kind, object)
        is_odd = not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted)
        is_odd = is_odd or (isinstance(value, int | float) and not abs(value) < 2**64)  # a seed has 64 bits
        is_odd = is_odd or (kind in _CHOICES and value not in _CHOICES[kind])
        if is_odd or (member is not object and not all(isinstance(v, member) for v in value)):
            raise ValueError(f"{name} is {str(value)[:80]!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSpec:
    """The properties of a group's ranks that do not depend on a test: ranks that fit one job fit every job with an equal spec.

    ``gpus`` is the value of CUDA_VISIBLE_DEVICES ('': not set), ``cores`` are those that the ranks are pinned to ('': none).
    ``environment`` are variables that ranks set before anything reads them. Under an outer launcher ``only`` is the one rank
    that is started here, and ``rendezvous`` ('host:port/prefix') is where all ranks meet.
    """

    world_size: int
    backend: str
    device: str
    gpus: str = ""
    cores: str = ""
    environment: dict[str, str] = field(default_factory=dict, hash=False)
    only: int = -1
    rendezvous: str = ""

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks that are started here."""
        return tuple(range(self.world_size)) if self.only < 0 else (self.only,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A test, or a function, to run on ``world_size`` ranks. Written to ``job.json`` in its folder.

    ``function`` is 'module:name' for the fixture `launch`, '' for a collected item; ``traces`` are the trace kinds;
    ``check_divergence`` compares what must be equal on all ranks; ``root`` is the tests' root folder, ``tmp`` the folder of their
    tmp_path; ``seed`` is for hypothesis; ``values`` are those of host fixtures, ``overrides`` those that a bisection tries,
    ``environment`` has the variables of the ranks; times are in seconds. ``reuse`` names the class or module with tests that share
    their ranks, '' for new ranks. Shared ranks form a new group for each test with ``fresh_group``, and wait for another test with
    ``stay``. ``gpus`` and ``cores`` are those that were leased, ``in_use`` are the files that ranks hold while they use them;
    ``debugger`` names the socket at which the host lends its terminal, to ``debug_rank`` (-1: to any rank); ``body`` is the file of
    the test's function, which counts as user code wherever it is. ``hash_seeds`` has PYTHONHASHSEED of each rank, which is then a
    new interpreter; ``flow`` records the ranks' control flow; ``measures`` has the settings of a coverage by test.
    """

    nodeid: str
    folder: str
    root: str = ""
    world_size: int
    backend: str
    device: str = "cpu"
    function: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    scenario: str = ""
    reads_as: str = ""
    parallel: str = "none"
    static_graph: bool = False
    fsdp_version: int = 2
    traces: tuple[str, ...] = ()
    check_divergence: bool = False
    timeout: float = 300.0
    created: float = 0.0
    seed: int = 0
    values: dict[str, Any] = field(default_factory=dict)
    overrides: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    tmp: str = ""
    gpus: str = ""
    cores: str = ""
    in_use: tuple[str, ...] = ()
    only: int = -1
    rendezvous: str = ""
    debugger: str = ""
    debug_rank: int = -1
    reuse: str = ""
    fresh_group: bool = False
    stay: bool = False
    body: str = ""
    hash_seeds: tuple[int, ...] = ()
    flow: bool = False
    measures: dict[str, Any] = field(default_factory=dict)

    @property
    def group_spec(self) -> GroupSpec:
        """The ranks that this job needs."""
        return GroupSpec(
            world_size=self.world_size, backend=self.backend, device=self.device, gpus=self.gpus, cores=self.cores,
            environment=self.environment, only=self.only, rendezvous=self.rendezvous,
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        # Not `asdict`, which copies deeply: this is called for each test.
        return {"schema": SCHEMA, **{name: getattr(self, name) for name in self.__dataclass_fields__}}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Job:
        """Build it from what `to_json` returned; fields of a later schema are ignored."""
        known = {name: value for name, value in data.items() if name in cls.__dataclass_fields__}
        return cls(**{**known, **{name: tuple(data.get(name, ())) for name in ("traces", "in_use", "hash_seeds")}})

    @classmethod
    def from_stranger(cls, data: Any) -> Job:
        """Build it from a file that any program may have written. Raises ValueError that describes what is wrong in it."""
        check_kinds(cls, data)
        missing = [name for name in ("nodeid", "folder", "world_size", "backend") if name not in data]
        if missing:
            raise ValueError(f"it has no {missing[0]}")
        if not 0 < data["world_size"] <= MOST_RANKS:
            raise ValueError(f"world_size is {str(data['world_size'])[:80]}: from 1 to {MOST_RANKS} can be read")
        return cls.from_json(data)

    def rank_folder(self, rank: int) -> Path:
        """Return the folder of a rank's evidence."""
        return Path(self.folder) / f"rank{rank}"


def plain_nodeid(nodeid: str) -> str:
    """Return a node id without xdist's '@group' suffix."""
    head, bracket, tail = nodeid.rpartition("]")
    path, colons, name = tail.rpartition("::")  # a folder may have an @, as may a parameter
    return head + bracket + path + colons + name.partition("@")[0] if "::" in nodeid else nodeid


class Channel:
    """JSON lines over a connected stream socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._buffer = b""
        self.closed = False

    def fileno(self) -> int:
        """Return the socket's file descriptor, for select."""
        return self.socket.fileno()

    @property
    def has_ended(self) -> bool:
        """Whether the peer has disconnected; messages that it sent may still be received."""
        if self.closed:
            return True
        poll = select.poll()
        poll.register(self.socket, select.POLLRDHUP)
        return bool(poll.poll(0))

    def send(self, **message: Any) -> None:
        """Send one message. Raises nothing if the peer has disconnected: `receive` reports that."""
        if self.closed:
            return
        try:
            self.socket.sendall(dumps(message).encode() + b"\n")
        except (BrokenPipeError, ConnectionResetError):
            self.closed = True

    def receive(self, timeout: float | None) -> list[dict[str, Any]]:
        """Return the messages that arrived; wait up to ``timeout`` seconds for the first (None: for ever). [] at end of file."""
        messages = self._take()
        deadline = None if timeout is None else clock_gettime(CLOCK_MONOTONIC) + timeout
        while not messages and not self.closed:
            left = None if deadline is None else max(0.0, deadline - clock_gettime(CLOCK_MONOTONIC))
            if not select.select([self.socket], [], [], left)[0]:
                break
            try:
                data = self.socket.recv(1 << 16)
            except ConnectionResetError:
                data = b""
            if not data:
                self.closed = True
            self._buffer += data
            messages = self._take()
        return messages

    def _take(self) -> list[dict[str, Any]]:
        *lines, self._buffer = self._buffer.split(b"\n")
        return [loads(line) for line in lines if line]

    def shut_down(self) -> None:
        """Close the connection for every process that holds the socket."""
        self.closed = True
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
