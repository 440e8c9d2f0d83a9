"""The board: one small file per rank, mapped shared, with the rank's location.

A write is a store into mapped memory: no system call, no flush. The page survives whatever happens to the rank
(SIGKILL, SIGSTOP, the GIL held for ever), and reading it disturbs no process. The file describes itself: its first
``HEADER`` bytes are JSON with the offset and format of every field, so a reader needs no code of this package.
"""

import functools
import json
import mmap
import os
import resource
import struct
from collections.abc import Callable
from typing import Any

from nsa.trace.files import close, open_fd, wall_clock

SCHEMA = 4
HEADER = 4096
RING_SIZE = 256
MAX_PARAMETERS = 8192
MAX_PATH = 2048  # calls of modules in a forward
UNKNOWN = 0xFFFF  # a module outside the model
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # a fork writes into its own copy
PHASES = ("start", "body", "data", "forward", "backward", "optimizer", "done")

_NUMBERS = {
    "pid": "q", "rank": "q", "world_size": "q", "step": "q", "phase": "q", "phase_time": "d",
    "beat": "q", "beat_time": "d", "beat_monotonic": "d", "gil_late": "d", "line_time": "d",
    "modules_entered": "q", "progress": "q",
    "path_base": "q",  # the value of modules_entered when the forward began
    "path_length": "q",  # of a forward that has ended; -1: it runs, and its length is modules_entered - path_base
    "gradients": "q", "gradients_expected": "q",
    "collectives_entered": "q", "collectives_left": "q", "blocked_in": "q",
    "calls_from": "q",  # the index of the first call that is not of a default group that has been destroyed
    "failed_in": "q",  # as blocked_in: the last call of the main thread, if an exception ended it
    "nodes": "q", "nodes_owned": "q", "still_looks": "q", "still_moves": "q",
    "limit_time": "d",  # when the call that blocks the main thread ends by itself; 0: it has no such limit
    "polled_time": "d", "polled_from": "d",  # when the main thread last queried a store, and when it began to poll it
    "on_device": "q",  # 1: collectives were observed that run on after their wait
    "call": "q",  # of the test: 1 while it runs, 2 from its end on; fixtures are set up before and torn down after
    "batches": "q", "loaders_ended": "q",  # of data loaders in this process: batches delivered, iterators that were exhausted
}  # fmt: skip
_TEXTS = {"module": 160, "parameter": 160, "line": 512, "phase_line": 512, "nodes_module": 160, "key": 160}

# A record's `commit` is its index + 1 and is written last: if it differs, the record is incomplete.
_RECORD: tuple[tuple[str, str], ...] = (
    ("commit", "q"), ("sequence", "q"), ("count", "q"), ("step", "q"), ("phase", "q"), ("peer", "q"), ("size", "q"),
    ("root", "q"), ("side_thread", "q"),
    ("entered", "d"), ("left", "d"), ("dropped", "d"), ("op", "32s"), ("group", "24s"), ("dtype", "16s"), ("reduction", "12s"),
    ("note", "96s"), ("site", "256s"), ("callers", "256s"),
)  # fmt: skip
_RECORD_STRUCT = struct.Struct("<" + "".join(code for _, code in _RECORD))
_OFFSETS = {name: struct.calcsize("<" + "".join(c for _, c in _RECORD[:i])) for i, (name, _) in enumerate(_RECORD)}
_INT, _FLOAT = struct.Struct("<q"), struct.Struct("<d")
_MOVES = ("progress", "modules_entered", "gradients", "collectives_entered", "collectives_left")


def _cut(note: str) -> bytes:
    """Return the part of a note that fits into a record; it ends with '…' if the note was cut."""
    data = note.encode()
    return data if len(data) <= 96 else data[:93].decode(errors="ignore").encode() + "…".encode()


@functools.cache
def _layout(slots: int = RING_SIZE) -> tuple[dict[str, Any], bytes, int]:
    """Return the layout of a board with ``slots`` collectives, as values and as the file's header, and its size in bytes."""
    offset, numbers, texts = HEADER, {}, {}
    for name, code in _NUMBERS.items():
        numbers[name] = [offset, code]
        offset += 8
    for name, size in _TEXTS.items():
        texts[name] = [offset, size]
        offset += size
    # A byte per parameter, in the model's order: 1 when its gradient has arrived.
    arrived = [offset, MAX_PARAMETERS]
    offset += MAX_PARAMETERS
    path = [offset, MAX_PATH]  # two bytes per call: the module's place in `named_modules`, of the current forward
    offset += 2 * MAX_PATH
    ring = {"offset": offset, "size": slots, "stride": _RECORD_STRUCT.size, "record": [list(f) for f in _RECORD]}
    layout = {
        "schema": SCHEMA,
        "phases": PHASES,
        "numbers": numbers,
        "texts": texts,
        "arrived": arrived,
        "path": path,
        "ring": ring,
    }
    header = json.dumps(layout).encode()
    if len(header) > HEADER:
        raise AssertionError("the board's header outgrew its page")
    return layout, header, -(-(offset + slots * _RECORD_STRUCT.size) // 8) * 8


def header() -> bytes:
    """Return the first page of a board of the usual size, as a file has it."""
    return _layout()[1].ljust(HEADER, b"\0")


def _mapped(path: str | os.PathLike[str], size: int) -> mmap.mmap:
    """Map a file of zeros. The monitor may have made it, with reserved disk space, which is kept."""
    fd = open_fd(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        if os.pread(fd, 1, 0) not in (b"", b"\0"):  # an earlier rank's
            os.ftruncate(fd, 0)
        os.posix_fallocate(fd, 0, size)  # a store into a page that the disk cannot hold is a SIGBUS
        return mmap.mmap(fd, size)
    finally:
        close(fd)


class Board:
    """The writer's side. `number` and `text` set the fields of a rank; `enter` and `leave` record its collectives."""

    def __init__(self, path: str | os.PathLike[str] | None = None, rank: int = 0, world_size: int = 1) -> None:
        layout = _layout()[0]
        self._numbers = {
            name: (place[0], _FLOAT if place[1] == "d" else _INT) for name, place in layout["numbers"].items()
        }
        # The positions of counters, in 8-byte words, and of texts, in bytes: computed once, as calls are frequent.
        self._words = {name: offset // 8 for name, (offset, _) in self._numbers.items()}
        self._slices = {name: slice(offset, offset + size) for name, (offset, size) in layout["texts"].items()}
        self._module, self._parameter = self._slices["module"], self._slices["parameter"]
        self._entered, self._gradients = self._words["modules_entered"], self._words["gradients"]
        self._arrived = layout["arrived"][0]
        self._ring = layout["ring"]["offset"]
        self._path = layout["path"][0]
        self.open(path, rank, world_size)

    def open(self, path: str | os.PathLike[str] | None, rank: int, world_size: int) -> None:
        """Begin again in the file ``path`` (None: in memory that no other process sees). Raises OSError, also on a full disk.

        If `ulimit -f` does not allow a file of the usual size, the board holds fewer collectives.
        """
        self._slots = RING_SIZE
        if path is not None:
            limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
            if limit != resource.RLIM_INFINITY:
                self._slots = max(1, min(RING_SIZE, (limit - self._ring) // _RECORD_STRUCT.size - 1))
        _, header, size = _layout(self._slots)
        self._map = mmap.mmap(-1, size, flags=_PRIVATE) if path is None else _mapped(path, size)
        self._map[: len(header)] = header
        view = memoryview(self._map)
        self._counters, self._calls = view.cast("q"), view[self._path : self._path + 2 * MAX_PATH].cast("H")
        self._path_base = 0
        self.phase_name, self.phase_since = "start", wall_clock()
        for name, value in (
            ("pid", os.getpid()),
            ("rank", rank),
            ("world_size", world_size),
            ("phase_time", wall_clock()),
        ):
            self.number(name, value)

    def number(self, name: str, value: float) -> None:
        offset, code = self._numbers[name]
        code.pack_into(self._map, offset, value)

    def add(self, name: str) -> None:
        self._counters[self._words[name]] += 1

    def count(self, name: str) -> int:
        return self._counters[self._words[name]]

    @property
    def moves(self) -> tuple[int, ...]:
        """The counters that change while the rank makes progress."""
        return tuple(self.count(name) for name in _MOVES)

    def text(self, name: str, value: str) -> None:
        """Store a text field, cut to its size."""
        self.put(name, self.padded(value, name))

    def arrival(self, index: int, name: bytes) -> Callable[[object], None]:
        """Return a hook that records on this board, until it is opened again, that the gradient of parameter ``index`` has arrived.

        ``name`` is a result of `padded`. The hook is called for each parameter in each step, so it looks nothing up.
        """
        mapped, counters, gradients, parameter = self._map, self._counters, self._gradients, self._parameter
        at = self._arrived + index

        def arrived(_: object) -> None:
            mapped[at] = 1
            mapped[parameter] = name
            counters[gradients] += 1

        def counted(_: object) -> None:
            mapped[parameter] = name
            counters[gradients] += 1

        return arrived if index < MAX_PARAMETERS else counted

    def has_arrived(self, index: int) -> bool:
        """Return whether the gradient of parameter ``index`` has arrived in the latest backward."""
        return index >= MAX_PARAMETERS or self._map[self._arrived + index] != 0

    def begin_backward(self) -> None:
        """Clear the arrived gradients, and end the forward's path: modules called from now on are not part of it."""
        self._map[self._arrived : self._arrived + MAX_PARAMETERS] = bytes(MAX_PARAMETERS)
        self.number("gradients", 0)
        if self.count("path_length") < 0:
            self.number("path_length", min(self.count("modules_entered") - self._path_base, MAX_PATH))
            self._path_base = -1 << 62

    def begin_forward(self) -> None:
        """Begin a new path of module calls."""
        self._path_base = self.count("modules_entered")
        self.number("path_base", self._path_base)
        self.number("path_length", -1)

    def called(self, place: int, name: bytes) -> None:
        """Record a module's call: ``place`` is its number in the model's `named_modules`, ``name`` a result of `padded`."""
        counters = self._counters
        at = counters[self._entered]
        counters[self._entered] = at + 1
        at -= self._path_base
        if at < MAX_PATH:
            self._calls[at] = place
        self._map[self._module] = name

    def padded(self, name: str, field: str = "module") -> bytes:
        """Return a text as `called` and `put` take it, cut at its front: paths and modules' names differ at their ends."""
        size = _TEXTS[field]
        return name.encode(errors="replace")[-size:].ljust(size, b"\0")

    def put(self, field: str, text: bytes) -> None:
        """Set a text field to a result of `padded`."""
        self._map[self._slices[field]] = text

    def phase(self, name: str) -> None:
        """Record that the rank enters a phase (one of PHASES)."""
        self.phase_name, self.phase_since = name, wall_clock()
        self.number("phase_time", self.phase_since)
        self.number("phase", PHASES.index(name))
        self.add("progress")

    def enter(
        self, op: str, group: str, sequence: int, dtype: str, count: int, site: str, *, size: int, peer: int = -1,
        root: int = -1, reduction: str = "", note: str = "", callers: str = "", side_thread: bool = False,
    ) -> int:  # fmt: skip
        """Record the entry into a collective of a group of ``size`` ranks; return the index for `leave`.

        ``peer``: of a send or receive; ``root``: of a broadcast, reduce, gather or scatter; ``reduction``: sum, max, ...;
        ``note``: a new group's name and ranks, a tag, split sizes, cut off with '…' if it is long; ``site`` and ``callers`` as
        `frames.call_path` returns them; ``side_thread``: a thread of Python's other than the main one called.
        """
        index = self.count("collectives_entered")
        offset = self._ring + (index % self._slots) * _RECORD_STRUCT.size
        _INT.pack_into(self._map, offset, 0)
        _RECORD_STRUCT.pack_into(
            self._map, offset, 0, sequence, count, self.count("step"), PHASES.index(self.phase_name), peer, size,
            root, side_thread, wall_clock(), 0.0, 0.0, op.encode(), group.encode()[-24:], dtype.encode()[:16],
            reduction.encode()[:12], _cut(note), site.encode()[-256:], callers.encode()[:256],
        )  # fmt: skip
        _INT.pack_into(self._map, offset, index + 1)
        self.add("collectives_entered")
        return index

    def leave(self, index: int, *, refused: bool = False) -> None:
        """Record that the collective ``index`` has completed. ``refused``: it raised before it began, so no other rank saw it."""
        now = wall_clock()
        self._end(index, "left", -now if refused else now)

    def drop(self, index: int) -> None:
        """Record that the program has dropped the Work of ``index``, a message that it never waited for, or a call that failed."""
        self._end(index, "dropped", wall_clock())

    def _end(self, index: int, field: str, value: float) -> None:
        if self.count("collectives_entered") - index <= self._slots:
            offset = self._ring + (index % self._slots) * _RECORD_STRUCT.size
            _FLOAT.pack_into(self._map, offset + _OFFSETS[field], value)
        self.add("collectives_left")
