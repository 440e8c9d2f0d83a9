"""The events of a rank's control flow, in a mapped file that survives whatever ends the process.

The file has a header and two halves. Events fill a half; then the other half is cleared and filled. So the file keeps the newest
events, at least a half of them. A half begins with its number, from 1 on, and with the codes, names and open frames that its events
need. An event begins with its kind; 0 ends a half. Numbers are little-endian.

| kind | fields behind it | meaning |
| --- | --- | --- |
| LINE | frame u32, line u32 | a frame begins a line |
| ENTER | frame u32, parent u32, code u32, thread u32 | a frame begins; parent 0: none is recorded |
| LEAVE | frame u32, text | a frame returns a value |
| SET, READ | frame u32, text | 'name\\0value': the latest line has set it, or decides by it |
| RAISED | frame u32, text | an exception is raised in a frame, or passes through it |
| CALL | frame u32, text | the frame begins a call that ranks must match: a JSON object |
| CODE | code u32, text | 'file\\0name\\0first line\\0checksum of its code' |
| HELD | frame u32, parent u32, code u32, thread u32, line u32, calls u32 | an open frame at a half's begin |
| RESUME | frame u32, parent u32, code u32, thread u32 | a generator's frame goes on, in another one |
| PAUSE | frame u32, text | a generator's frame waits to be asked for its next value; the text is empty |

A text is its length, u16, and UTF-8.
"""

import mmap
import os
import struct
import threading
from collections.abc import Callable

MAGIC = b"NSAFLOW1"
SIZE = 64 << 20  # bytes
LINE, ENTER, LEAVE, SET, READ, RAISED, CALL, CODE, HELD, RESUME, PAUSE = range(1, 12)
HEADER = struct.Struct("<8sQ")  # magic, bytes of a half
NUMBER = struct.Struct("<I")
LINE_EVENT = struct.Struct("<BII")
ENTER_EVENT = struct.Struct("<BIIII")
HELD_EVENT = struct.Struct("<BIIIIII")
TEXT_EVENT = struct.Struct("<BIH")
MOST_TEXT = 4096  # bytes
_ROOM = 1 << 16  # bytes before a half's end: threads may write there while another one begins the other half


class FlowLog:
    """A file of events. ``on_turn()`` is called when a half is full, to write again what the other half's events need.

    `mmap.write` copies an event and moves on in one step, so that another thread, or a finalizer, cannot write into it.
    """

    def __init__(self, path: str | os.PathLike[str], on_turn: Callable[[], None], size: int = SIZE) -> None:
        self._half = (size - HEADER.size) // 2
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, HEADER.size + 2 * self._half)  # sparse: what is not written takes no space
            self.map = mmap.mmap(fd, HEADER.size + 2 * self._half)
        finally:
            os.close(fd)
        HEADER.pack_into(self.map, 0, MAGIC, self._half)
        self._on_turn = on_turn
        self._turning = threading.Lock()
        self._number = 0
        self._begin_half()

    def _begin_half(self) -> None:
        begin = HEADER.size + self._number % 2 * self._half
        if self._number >= 2:
            self.map[begin : begin + self._half] = bytes(self._half)
        self._number += 1
        self.map.seek(begin)
        self.map.write(NUMBER.pack(self._number))
        self.end = begin + self._half - min(_ROOM, self._half // 4)

    def write(self, event: bytes) -> None:
        """Write a packed event."""
        if self.map.tell() + len(event) > self.end:
            self.turn()
        self.map.write(event)

    def turn(self) -> None:
        """Go on in the other half."""
        if self._turning.acquire(blocking=False):  # else another thread does it, or this one, below a finalizer
            try:
                self._begin_half()
                self._on_turn()
            finally:
                self._turning.release()

    def enter(self, frame: int, parent: int, code: int, thread: int, kind: int = ENTER) -> None:
        """Write that a frame begins, or goes on (RESUME)."""
        self.write(ENTER_EVENT.pack(kind, frame, parent, code, thread))

    def hold(self, frame: int, parent: int, code: int, thread: int, line: int, calls: int) -> None:
        """Write an open frame at the begin of a half."""
        event = HELD_EVENT.pack(HELD, frame, parent, code, thread, line, calls)
        if self.map.tell() + len(event) <= self.end:
            self.map.write(event)

    def text(self, kind: int, number: int, text: str) -> None:
        """Write an event with a text, of which the first `MOST_TEXT` bytes are kept."""
        data = text.encode(errors="backslashreplace")[:MOST_TEXT]
        event = TEXT_EVENT.pack(kind, number, len(data)) + data
        if kind == CODE and self._number > 1 and self.map.tell() + len(event) > self.end:
            return  # the table alone fills a half
        self.write(event)
