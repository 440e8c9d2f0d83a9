"""Read a rank's recorded control flow: frames, the lines that each executed, the values that lines set, and calls."""

from __future__ import annotations

import bisect
import json
import os
import struct
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pytest_nsa.wire.files import open_to_read

# The format that `nsa.trace.flow.log` writes and describes.
FILE = "flow.bin"
MAGIC = b"NSAFLOW1"
LARGEST = 128 << 20  # bytes of a half
MAIN = 0  # the number of the thread in which the recording began
_PART, _ZEROS = 1 << 20, 256  # bytes that are read at a time, and that are zeros behind the last event
LINE, ENTER, LEAVE, SET, READ, RAISED, CALL, CODE, HELD, RESUME, PAUSE = range(1, 12)
_HEADER = struct.Struct("<8sQ")
_NUMBER = struct.Struct("<I")
_TWO = struct.Struct("<II")
_FOUR = struct.Struct("<IIII")
_SIX = struct.Struct("<IIIIII")
_TEXT = struct.Struct("<IH")


@dataclass(frozen=True, slots=True)
class Call:
    """A call that ranks must match. ``kind`` is collective, send, receive, set (a key) or wait (for a key).

    ``place`` is (frame, index of its line). ``peer``, ``root``: ranks, -1 without one. ``what`` describes operation,
    type, number of elements and reduction; ``key`` is the store's.
    """

    kind: str
    op: str
    group: str
    what: str
    peer: int
    root: int
    note: str
    key: str
    place: tuple[int, int]


@dataclass(slots=True, eq=False)
class Frame:
    """A call of a function of the program. ``lines`` are those that it executed.

    By index of the line: ``children``, among them a generator's frame at each line that asked it for a value; ``values``
    (name -> text) that the line set, ``reads`` by which it decided, ``raised``, and the ``calls`` that it began, also those in
    functions that it called. The thread had begun ``begun_at`` calls before.
    """

    number: int
    file: str
    name: str
    first: int
    checksum: str  # of its code
    thread: int
    begun_at: int = 0
    lines: list[int] = field(default_factory=list)
    sets_at: list[int] = field(
        default_factory=list, repr=False
    )  # the number of attributes that had been set before each line
    calls: dict[int, list[Call]] = field(default_factory=dict, repr=False)
    children: dict[int, list[Frame]] = field(default_factory=dict, repr=False)
    values: dict[int, dict[str, str]] = field(default_factory=dict)
    reads: dict[int, dict[str, str]] = field(default_factory=dict)
    raised: dict[int, str] = field(default_factory=dict)
    is_open: bool = True  # it had not returned when the recording ended
    is_paused: bool = False  # a generator's: it waits to be asked for its next value, or was closed
    returned: str = ""
    above: Frame | None = field(default=None, repr=False)
    above_at: int = -1  # index of the parent's line
    _set_at: dict[str, list[int]] = field(
        init=False, default_factory=dict, repr=False
    )  # by name, where `values` has it

    @property
    def function(self) -> tuple[str, str, int, str]:
        """What identifies its function."""
        return self.file, self.name, self.first, self.checksum

    def list_open(self) -> list[Frame]:
        """Return it and the frames that led to it, the innermost first."""
        found = [self]
        while (above := found[-1].above) is not None:
            found.append(above)
        return found

    def get_position(self, index: int) -> tuple[int, ...]:
        """Return what orders its line of an index among the lines of its thread."""
        found, frame = [index], self
        while frame.above is not None:
            found.append(frame.above_at)
            frame = frame.above
        return (frame.number, *reversed(found))

    def get_value(self, at: int, name: str) -> str | None:
        """Return the value of a name behind the line of an index, as it was set last; None where it is not known."""
        if not self._set_at:
            for index, names in sorted(self.values.items()):
                for known in names:
                    self._set_at.setdefault(known, []).append(index)
        indices = self._set_at.get(name, [])
        before = bisect.bisect_right(indices, at)
        return self.values[indices[before - 1]][name] if before else None

    def add_call(self, at: int, call: Call) -> None:
        """Add a call that its line of an index began, to the frames that led to it, too."""
        frame: Frame | None = self
        while frame is not None:
            frame.calls.setdefault(at, []).append(call)
            at, frame = frame.above_at, frame.above

    def list_calls(self, begin: int, end: int | None = None) -> list[Call]:
        """Return the calls that the lines of the indices from ``begin`` to before ``end`` began, in their order."""
        return [
            call
            for index in sorted(self.calls)
            if begin <= index and (end is None or index < end)
            for call in self.calls[index]
        ]


@dataclass(slots=True)
class Flow:
    """The control flow of a rank: the outermost frames, and the calls of each thread, in their order."""

    rank: int
    roots: list[Frame] = field(default_factory=list)
    calls: dict[int, list[Call]] = field(default_factory=dict)
    frames: dict[int, Frame] = field(default_factory=dict)  # by number
    sets: list[tuple[str, str, Frame, int]] = field(
        default_factory=list
    )  # of attributes: chain, value, frame, index of the line
    raised: list[tuple[Frame, int]] = field(default_factory=list)  # the frame, and the index of the line that raised
    is_cut: bool = False  # the begin was not kept

    def first_kept(self, thread: int) -> int:
        """Return the number of a thread's first call that is kept."""
        calls = self.calls.get(thread, [])
        return next((n for n, call in enumerate(calls) if call is not _LOST), len(calls))

    def from_call(self, thread: int, number: int) -> Flow:
        """Return what a thread did from a call on: the frames that were open then, each from the line that it was in."""
        call, kept = self.calls[thread][number], {id(call) for call in self.calls[thread][number:]}
        frame, at = self.frames.get(call.place[0]), call.place[1]
        inner: Frame | None = None
        whole: Frame | None = None  # that ``inner`` is a part of
        while frame is not None and at >= 0:
            lines, sets_at = frame.lines[at:], frame.sets_at[at:]
            cut = replace(frame, lines=lines, sets_at=sets_at, above=None, above_at=-1)
            for held in ("calls", "children", "values", "reads", "raised"):
                setattr(cut, held, {k - at: v for k, v in getattr(frame, held).items() if k >= at})
            cut.begun_at = number
            if inner is not None:
                later = [f for f in cut.children.get(0, ()) if f.number > inner.number]
                cut.children = {k: [inner if f is whole else f for f in of] for k, of in cut.children.items()}
                cut.children[0] = [inner, *later]
                inner.above, inner.above_at = cut, 0
            cut.calls[0] = [call for call in cut.calls.get(0, ()) if id(call) in kept]
            inner, whole, at, frame = cut, frame, frame.above_at, frame.above
        return Flow(self.rank, [inner] if inner is not None else [], self.calls, self.frames, self.sets, self.raised)


def read_flow(path: Path, rank: int) -> Flow | None:
    """Return what a rank recorded; None without a file that can be read. Raise nothing for a damaged one: what is whole counts."""
    flow = Flow(rank)
    reader = _Reader(flow)
    try:
        for events in _halves(path):
            reader.read(events)
    except (OSError, struct.error, LookupError, ValueError, TypeError):  # absent, or with a damaged end
        pass
    return flow if flow.roots else None


def _halves(path: Path) -> list[bytes]:
    """Return the events of the halves, the older half first. What was not written is zeros, and not read."""
    fd, size = open_to_read(path)
    found = []
    try:
        magic, half = _HEADER.unpack(os.pread(fd, _HEADER.size, 0))
        if magic != MAGIC or not 0 < half <= LARGEST or size < _HEADER.size + 2 * half:
            return []
        for begin in (_HEADER.size, _HEADER.size + half):
            (number,) = _NUMBER.unpack(os.pread(fd, _NUMBER.size, begin))
            parts, at = [], begin + _NUMBER.size
            while number and at < begin + half and (part := os.pread(fd, min(_PART, begin + half - at), at)):
                parts.append(part)
                at += len(part)
                if not any(part[-_ZEROS:]):
                    break
            found.append((number, b"".join(parts)))
    finally:
        os.close(fd)
    return [events for number, events in sorted(found) if number]


class _Reader:
    """Builds a flow from its events."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.codes: dict[int, tuple[str, str, int, str]] = {}
        self.frames = flow.frames

    def read(self, data: bytes) -> None:
        """Read the events of a half."""
        frames, sets, at, end = self.frames, self.flow.sets, 0, len(data)
        while at < end:
            kind = data[at]
            at += 1
            if kind == LINE:
                number, line = _TWO.unpack_from(data, at)
                at += 8
                frame = frames.get(number)
                if frame is not None:
                    frame.lines.append(line)
                    frame.sets_at.append(len(sets))
            elif kind == ENTER:
                self._enter(*_FOUR.unpack_from(data, at))
                at += 16
            elif kind == RESUME:
                number, parent, _, _ = _FOUR.unpack_from(data, at)
                at += 16
                if number in frames:
                    frames[number].is_paused = False
                    children = self._place(frames[number], parent)
                    if frames[number].above is not None and frames[number] not in children:
                        children.append(frames[number])
            elif kind == HELD:
                self._hold(*_SIX.unpack_from(data, at))
                at += 24
            elif kind in (LEAVE, SET, READ, RAISED, CALL, CODE, PAUSE):
                number, size = _TEXT.unpack_from(data, at)
                at += 6
                self._text(kind, number, data[at : at + size].decode(errors="replace"))
                at += size
            else:
                return

    def _enter(self, number: int, parent: int, code: int, thread: int) -> Frame:
        frame = Frame(number, *self.codes[code], thread)
        frame.begun_at = len(self.flow.calls.setdefault(thread, []))
        self.frames[number] = frame
        self._place(frame, parent).append(frame)
        return frame

    def _place(self, frame: Frame, parent: int) -> list[Frame]:
        """Set the frame, and the index of its line, that called a frame, or that a generator's frame gives its next value to.

        Return the frames that this line called, or the outermost ones.
        """
        above = self.frames.get(parent)
        frame.above, frame.above_at = above, len(above.lines) - 1 if above is not None else -1
        return above.children.setdefault(frame.above_at, []) if above is not None else self.flow.roots

    def _hold(self, number: int, parent: int, code: int, thread: int, line: int, calls: int) -> None:
        if number in self.frames:
            return
        self.flow.is_cut = True
        known = self.flow.calls.setdefault(thread, [])
        known += [_LOST] * (calls - len(known))
        frame = self._enter(number, parent, code, thread)
        frame.lines.append(line)
        frame.sets_at.append(len(self.flow.sets))

    def _text(self, kind: int, number: int, text: str) -> None:
        if kind == CODE:
            file, name, first, checksum = text.split("\0")
            self.codes[number] = file, name, int(first), checksum
            return
        frame = self.frames.get(number)
        if kind == CALL:
            thread = frame.thread if frame is not None else 0
            place = (number, len(frame.lines) - 1) if frame is not None else (0, -1)
            call = _call(json.loads(text), place)
            self.flow.calls.setdefault(thread, []).append(call)
            at = len(frame.lines) - 1 if frame is not None else -1
            if frame is not None:
                frame.add_call(at, call)
        elif frame is None:
            return
        elif kind == LEAVE:
            frame.is_open, frame.returned = False, text
        elif kind == PAUSE:
            frame.is_paused = True
        elif kind == RAISED:
            frame.raised[len(frame.lines) - 1] = text
            self.flow.raised.append((frame, len(frame.lines) - 1))
        else:
            name, _, value = text.partition("\0")
            held = frame.values if kind == SET else frame.reads
            held.setdefault(len(frame.lines) - 1, {})[name] = value
            if kind == SET and "." in name:
                self.flow.sets.append((name, value, frame, len(frame.lines) - 1))


def _call(facts: dict[str, Any], place: tuple[int, int]) -> Call:
    return Call(
        kind=str(facts.get("kind", "collective")),
        op=str(facts.get("op", "")),
        group=str(facts.get("group", "")),
        what=str(facts.get("what", "")),
        peer=int(facts.get("peer", -1)),
        root=int(facts.get("root", -1)),
        note=str(facts.get("note", "")),
        key=str(facts.get("key", "")),
        place=place,
    )


_LOST = Call("lost", "", "", "", -1, -1, "", "", (0, -1))
