"""Read a rank's board, a mapped file that describes its own layout; also the board of a dead rank or of another version."""

from __future__ import annotations

import functools
import math
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pytest_nsa.wire.files import open_to_read, parse, read_bytes

HEADER = 4096
AFTER_LIMIT_S = 2.0  # for a call to end after its time limit (`BoardSnapshot.limit_time`)
LARGEST = 16 << 20  # bytes of a board
MOST = 1 << 16  # collectives that a board may hold
# The exceptions that decoding a damaged file raises.
_DAMAGED = (struct.error, KeyError, IndexError, ValueError, TypeError, AttributeError, OverflowError)
_MOVES = ("progress", "modules_entered", "collectives_entered", "collectives_left", "gradients")
Shape = tuple[str, str, str, int, int, str]  # group, operation, dtype, element count, root, reduction
_OF_ANY = ("step", "gradients", "gradients_expected", "beat", "gil_late")  # numbers of every board that readers use
ANY = -2  # the peer of a receive from any rank
CUT = "…"  # ends a note that was too long for its field on the board
NEW_GROUP = "new_group"  # the operation of making a group
OTHER_WORLD = "@"  # in the label of a group of another world, in which ranks have other numbers than in the job
DEFAULT_GROUPS = ("", "0", "ddp", "ddp:0", NEW_GROUP)
_BY_SEVERAL_METHODS = ("allreduce", "allgather", "reducescatter")
# One rank sends or receives all data, or ranks may send different amounts.
UNEVEN = ("gather", "scatter", "alltoall", "all_to_all")


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """One entry of the board's ring. ``left`` is 0 while the rank is inside; times in seconds since the epoch.

    ``dropped`` is when the program dropped the Work of a send or receive without a wait, 0 where it did not.
    ``peer`` is -1 except for sends and receives, ``root`` is -1 except for operations with a root; ``size`` is the number of
    ranks in the group; ``reduction`` is sum, max, ... where there is one; ``note`` has a new group's name and ranks ('2:
    0,1'), a tag ('tag 3'), or split sizes ('gives 1,2 takes 2,1'); ``callers`` has the user's lines that led to ``site``,
    innermost first ('train.py:30 in step < main.py:12 in main'), after those of a library that it has called
    ('torchmetrics/metric.py:480 in sync << train.py:30 in step'); ``side_thread`` is 1 where a thread of Python's other than
    the main one called.
    """

    index: int
    op: str
    group: str
    sequence: int
    dtype: str
    count: int
    site: str
    step: int
    phase: str
    peer: int
    size: int
    entered: float
    left: float
    root: int = -1
    reduction: str = ""
    note: str = ""
    callers: str = ""
    dropped: float = 0.0
    side_thread: int = 0

    @property
    def way(self) -> tuple[str, ...]:
        """``site`` and the lines that led there, innermost first: a helper that is called from two places has two ways."""
        callers = self.callers.rpartition(" << ")[2]
        return (self.site, *callers.split(" < ")) if callers else (self.site,)

    @property
    def library(self) -> tuple[str, ...]:
        """The lines of a library that ``site`` has called: by them one line of the user's begins several calls."""
        return tuple(filter(None, self.callers.rpartition(" << ")[0].split(" < ")))

    @property
    def lines(self) -> tuple[str, ...]:
        """`library` and `way`, innermost first."""
        return (*self.library, *self.way)

    @property
    def is_inside(self) -> bool:
        """Whether it was entered and not left. False if its Work was dropped: whether such a call has completed is unknown."""
        return self.left == 0 and not self.dropped

    @property
    def is_send(self) -> bool:
        """Whether it sends to one rank."""
        return self.op.startswith("send")

    @property
    def is_receive(self) -> bool:
        """Whether it receives, from one rank or from any."""
        return self.op.startswith("recv")

    @property
    def was_refused(self) -> bool:
        """Whether it raised before it began, so that the rank has not taken part in it."""
        return self.left < 0

    @property
    def shape(self) -> Shape:
        """What must be equal on all ranks of the group; without the payload, for operations in which it may differ."""
        if self.op.startswith(UNEVEN):
            return (self.group, self.op, "", 0, self.root, "")
        return (self.group, _get_pair_name(self.op), self.dtype, self.count, self.root, self.reduction)

    @property
    def process_group(self) -> str:
        """The name of its group. The board counts the calls that DDP makes by itself separately, as group 'ddp:NAME'."""
        return self.group.removeprefix("ddp:")

    @property
    def place(self) -> tuple[str, int]:
        """Group and sequence number, which identify a collective on all ranks."""
        return (self.group, self.sequence)

    def describe(self) -> str:
        """'allreduce #7 (float32 x 1) at train.py:210 in step'."""
        by = f" by {self.library[0]}" if self.library else ""
        return self.describe_payload() + (f" at {self.site}" if self.site else "") + by

    def describe_number(self) -> str:
        """'allreduce #7'; without a number for a send or receive: these pair by peer and tag."""
        return self.op if self.peer != -1 else f"{self.op} #{self.sequence}"

    def describe_payload(self) -> str:
        """'allreduce #7 (float32 x 1)'."""
        payload = [f"{self.dtype} x {self.count}"] if self.dtype else []
        if self.reduction not in ("", "sum"):
            payload.append(self.reduction)
        if self.root != -1 or self.peer != -1:
            gives = self.op.startswith(("broadcast", "scatter", "recv"))
            who = "any rank" if self.peer == ANY else f"rank {max(self.root, self.peer)}"
            payload.append(f"{'from' if gives else 'to'} {who}")
        if self.note:
            payload.append(self.note)
        if self.group not in DEFAULT_GROUPS:
            payload.append(f"group {self.group}")
        shown = f" ({', '.join(payload)})" if payload else ""
        return f"{self.describe_number()}{shown}"


@dataclass(frozen=True, kw_only=True)
class BoardSnapshot:
    """A copy of a board. Its ring of collectives is decoded on first use."""

    numbers: dict[str, float]
    phase: str
    module: str
    parameter: str
    line: str
    phase_line: str
    nodes_module: str
    key: str
    path: tuple[int, ...]
    arrived: bytes
    decode_ring: Callable[[], tuple[Collective, ...]] = field(repr=False)

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """The last collectives, oldest first, without those that were refused and those in groups that were destroyed."""
        first = self.numbers.get("calls_from", 0)
        try:
            return tuple(c for c in self.decode_ring() if not c.was_refused and (c.index >= first or c.op == NEW_GROUP))
        except _DAMAGED:
            return ()

    @property
    def pid(self) -> int:
        """The process that has made the board."""
        return int(self.numbers["pid"])

    @property
    def signature(self) -> tuple[float, ...]:
        """The numbers that change when the rank makes progress."""
        n = self.numbers
        return tuple(n.get(name, 0) for name in _MOVES)

    @property
    def blocked(self) -> Collective | None:
        """The collective that the main thread waits in."""
        index = int(self.numbers.get("blocked_in", 0)) - 1
        return next((c for c in self.collectives if c.index == index), None) if index >= 0 else None

    @property
    def limit_time(self) -> float:
        """When the call that blocks the main thread ends by its time limit, in seconds since the epoch; 0.0 without a limit."""
        return self.numbers.get("limit_time", 0.0)

    @property
    def awaited_call(self) -> Collective | None:
        """The collective that the rank waits in: the one that blocks its main thread, else the oldest it is inside."""
        return self.blocked or (self.inside[0] if self.inside else None)

    @cached_property
    def inside(self) -> tuple[Collective, ...]:
        """Collectives entered and not left, oldest first."""
        return tuple(c for c in self.collectives if c.is_inside)


def make_board(
    numbers: Mapping[str, float], *, phase: str = "", line: str = "", ring: tuple[Collective, ...] = ()
) -> BoardSnapshot:
    """Return the board of a rank that leaves none, with what other sources show of it."""
    return BoardSnapshot(
        numbers={**dict.fromkeys(_OF_ANY, 0.0), **numbers}, phase=phase, module="", parameter="",
        line=line, phase_line="", nodes_module="", key="", path=(), arrived=b"", decode_ring=lambda: ring,
    )  # fmt: skip


def _get_pair_name(op: str) -> str:
    """Return one name for methods that backends pair with each other: functional or not, of a list of tensors or of one tensor."""
    bare = op.replace("_", "")
    return next((name for name in _BY_SEVERAL_METHODS if bare.startswith(name) and "coalesced" not in bare), op)


def get_world(group: str) -> str:
    """Return the part of a group's label that names another world than the job's; '' where it is the job's."""
    _, mark, place = group.partition(OTHER_WORLD)
    return mark + place


class BoardReader:
    """Reads one board file repeatedly."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._layout: _Layout | None = None
        self._used = 1  # entries of the ring

    def read(self) -> BoardSnapshot | None:
        """Return the board's present state; None if there is no board, or its header is being written."""
        try:
            fd, size = open_to_read(self.path)
        except OSError:
            return None
        try:
            found = self._used_part(fd, size)
            board = None if found is None or self._layout is None else _decode(self._layout, *found)
            return board if board is not None and all(map(math.isfinite, board.numbers.values())) else None
        except (OSError, *_DAMAGED, MemoryError):
            return None
        finally:
            os.close(fd)

    def _used_part(self, fd: int, size: int) -> tuple[bytes, dict[str, float]] | None:
        """Return the file up to the last used entry of the ring (a tenth of it in a short test), and its numbers; None if it
        is no board.
        """
        if self._layout is None:
            self._layout = _choose_layout(os.pread(fd, HEADER, 0))
        if self._layout is None:
            return None
        ring = self._layout.ring
        if size < ring["offset"] + ring["size"] * ring["stride"] or not 0 < ring["size"] <= MOST:
            return None  # cut short, by a full disk or an incomplete copy; or no board
        while True:  # until the ring has no more entries than were read
            end = max(self._layout.end, ring["offset"] + self._used * ring["stride"])
            data = os.pread(fd, min(end, LARGEST), 0)
            numbers = self._layout.numbers(data)
            entered = min(ring["size"], int(numbers["collectives_entered"]))
            if entered <= self._used:
                return data, numbers
            self._used = entered


def learn(header: bytes) -> None:
    """Keep the layout of a board's first page, so that forks of this process need not read it."""
    _choose_layout(header)


def read_numbers(path: Path) -> dict[str, float]:
    """Return only the number fields of a board; {} if there is no board."""
    try:
        data = read_bytes(path, 2 * HEADER)
        layout = _choose_layout(data[:HEADER])
        return layout.numbers(data) if layout is not None else {}
    except (OSError, *_DAMAGED):
        return {}


def masked_board(data: bytes, mask: Callable[[str], str]) -> bytes:
    """Return a board with ``mask`` applied to its texts, each cut to its field; unchanged if it is no board."""
    try:
        layout = _choose_layout(data[:HEADER])
        places = [] if layout is None else layout.texts()
    except _DAMAGED:
        return data
    board = bytearray(data)
    for offset, size in places:
        text = _text(data[offset : offset + size])
        by = mask(text) if text else text
        if by != text:
            board[offset : offset + size] = by.encode(errors="replace")[:size].ljust(size, b"\0")
    return bytes(board)


class _Layout:
    """The fields of a board, by its header. Raises one of `_DAMAGED` for a header that is no board's."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields, self.ring = fields, fields["ring"]
        path = fields.get("path", (0, 0))
        ends = [
            offset + size for offset, size in [*fields["texts"].values(), fields["arrived"], (path[0], 2 * path[1])]
        ]
        places = sorted((offset, code, name) for name, (offset, code) in fields["numbers"].items())
        self.end = max([*ends, *(offset + 8 for offset, _, _ in places)])  # of all fields outside the ring
        self._names, self._first, form, at = [name for _, _, name in places], places[0][0], "<", places[0][0]
        for offset, code, _ in places:
            form += "x" * (offset - at) + code
            at = offset + struct.calcsize("<" + code)
        self._numbers = struct.Struct(form)

    def texts(self) -> list[tuple[int, int]]:
        """Return offset and size of each text, also of those in the ring."""
        found = [(offset, size) for offset, size in self.fields["texts"].values()]
        at = self.ring["offset"]
        for _, code in self.ring["record"]:
            size = struct.calcsize("<" + code)
            if code.endswith("s"):
                found += [(at + slot * self.ring["stride"], size) for slot in range(min(self.ring["size"], MOST))]
            at += size
        return found

    def numbers(self, data: bytes) -> dict[str, float]:
        """Return the number fields, by name."""
        return dict(zip(self._names, self._numbers.unpack_from(data, self._first), strict=True))


@functools.lru_cache(maxsize=16)  # one header for all boards of a version
def _choose_layout(header: bytes) -> _Layout | None:
    """Return None while the header is being written. Raises one of `_DAMAGED`."""
    fields = parse(header.rstrip(b"\0 "))
    return _Layout(fields) if isinstance(fields, dict) else None


def _decode(of: _Layout, data: bytes, numbers: dict[str, float]) -> BoardSnapshot:
    layout = of.fields
    phases = layout["phases"]
    texts = {name: _text(data[offset : offset + size]) for name, (offset, size) in layout["texts"].items()}
    start, size = layout["arrived"]
    return BoardSnapshot(
        numbers=numbers,
        phase=phases[int(numbers["phase"])],
        module=texts["module"],
        parameter=texts["parameter"],
        line=texts["line"],
        phase_line=texts.get("phase_line", ""),
        nodes_module=texts.get("nodes_module", ""),
        key=texts.get("key", ""),
        path=_path(layout, numbers, data),
        arrived=data[start : start + min(size, int(numbers["gradients_expected"]))],
        decode_ring=lambda: _ring(layout["ring"], data, int(numbers["collectives_entered"]), phases),
    )


def _path(layout: Mapping[str, Any], numbers: dict[str, float], data: bytes) -> tuple[int, ...]:
    if "path" not in layout:
        return ()
    offset, size = layout["path"]
    length = int(numbers["path_length"])
    if length < 0:  # the forward runs
        length = int(numbers["modules_entered"] - numbers["path_base"])
    return struct.unpack_from(f"<{min(length, size)}H", data, offset)


def _ring(ring: Mapping[str, Any], data: bytes, entered: int, phases: list[str]) -> tuple[Collective, ...]:
    names = [name for name, _ in ring["record"]]
    record = struct.Struct("<" + "".join(code for _, code in ring["record"]))
    found = []
    for index in range(max(0, entered - ring["size"]), entered):
        values = dict(
            zip(names, record.unpack_from(data, ring["offset"] + (index % ring["size"]) * ring["stride"]), strict=True)
        )
        if values.pop("commit") != index + 1:
            continue  # incomplete: it is being written
        texts = {k: _text(v) for k, v in values.items() if isinstance(v, bytes)}
        found.append(Collective(index=index, **{**values, **texts, "phase": phases[values["phase"]]}))
    return tuple(found)


def _text(data: bytes) -> str:
    return data.split(b"\0", 1)[0].decode(errors="replace")
