"""A thread that beats: it shows that the interpreter runs, how late a beat is (the GIL), and the line of the main thread."""

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable
from json import dumps
from os import getpid
from pathlib import Path
from typing import Any

import torch

from nsa.trace.board import Board
from nsa.trace.calls.collectives import CollectiveRecorder
from nsa.trace.events import SCHEMA
from nsa.trace.files import close, monotonic, open_to_append, wall_clock, write, write_atomically
from nsa.trace.frames import describe_line, is_user_file
from nsa.trace.memory import on_gpu_mib, resident_mib
from nsa.trace.stall.counters import REQUEST, write_counters
from nsa.trace.stall.held_up import asyncio_tasks, handled_exception
from nsa.trace.stall.stacks import Place, as_dump, look

INTERVAL = 0.05
RECORD_EVERY = 1.0
CHANGES = 100  # of phase that are written one by one; after that a fast loop would write tens of megabytes per minute
CHANGE_EVERY = 0.05  # seconds between lines after that
MEMORY_EVERY = 0.1  # seconds; lines in between repeat the last values
STALL_S = 0.8
STALL_AGAIN_S = 2.0
DUMP_REQUEST = "dump.asked"
MOST_LINES = 16
REST_S = 3.0  # in which the monitor dumps the stacks
# In each, the second is the name in older torch, where NCCL alone has a recorder.
BUFFER_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")


class Heartbeat:
    """Beats on the board every 50 ms; appends a line to ``heartbeat_rank{r}.jsonl`` every second and at each new phase; after the
    first 100 phases, only at the last of phases that follow each other within 50 ms.

    If the main thread is stalled, the stacks of all threads are written to the file ``stall``, so that no other process
    has to disturb the rank for them.
    """

    def __init__(
        self,
        board: Board,
        recorder: CollectiveRecorder,
        path: str | os.PathLike[str],
        rank: int,
        stall: Path,
        label: str = "",
    ) -> None:
        self.board = board
        self._stall = stall
        self._moves_seen: tuple[int, ...] = ()
        self._since = monotonic()
        self._written = 0.0
        # Code and instruction of the main thread: if they do not change, it is inside one native call.
        self._place: tuple[int, int] = (0, 0)
        self._looks = self._moves = 0
        self._lines: dict[str, None] = {}  # of the user's code, where the main thread was found in this stall
        self._modules = len(sys.modules)
        self._has_answered = False
        self.on_stall: Callable[[], None] | None = None  # called at each beat of a stall
        self.rests = False  # while the monitor dumps the stacks
        self._changes, self._changed, self._owes_line = 0, 0.0, False
        self.recorder = recorder
        self.label = label
        self._file = open_to_append(path)
        self._main = threading.main_thread().ident
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nsa-heartbeat", daemon=True)
        self._late = 0.0
        self._start = f'"rank": {rank}, "pid": {getpid()}'
        self._resident, self._memory_read = "null", 0.0
        self._on_gpu = '"cuda_allocated_mib": null, "cuda_reserved_mib": null'

    def start(self) -> None:
        """Start to beat, and to watch the main thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and write a last line."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self.record()
        close(self._file)

    def change(self) -> None:
        """Record that the rank has entered another phase."""
        now = monotonic()
        if now - self._memory_read >= MEMORY_EVERY:
            self._read_memory(now)
        self._changes += 1
        self._owes_line = self._changes > CHANGES and now - self._changed < CHANGE_EVERY  # then the next beat writes it
        if not self._owes_line:
            self._changed = now
            self.record()

    def record(self, at: float = 0.0, **more: Any) -> None:
        """Append a line with the present time, or ``at``; in one write, so that a killed rank loses at most its current line."""
        count = self.board.count
        # JSON by hand: this is written at every change of phase.
        line = (
            f'{{"time": {at or wall_clock()}, {self._start}, "step": {count("step")}, "phase": "{self.board.phase_name}", '
            f'"gradients": {count("gradients")}, "modules_entered": {count("modules_entered")}, '
            f'"collectives": {count("collectives_entered")}, "backend": {dumps(self.label)}, '
            f'"rss_mib": {self._resident}, {self._on_gpu}'
        )
        extra = f", {dumps(more)[1:-1]}" if more else ""
        with contextlib.suppress(OSError):  # a full disk, for example: the traced program continues
            write(self._file, f"{line}{extra}}}\n".encode())

    def _read_memory(self, now: float) -> None:
        """Read this process's memory. Only the main thread queries CUDA's allocator, which may be locked while that thread is
        stalled.
        """
        self._memory_read = now
        self._resident = f"{resident_mib():.1f}"
        on_gpu = on_gpu_mib()
        if on_gpu is not None:
            self._on_gpu = f'"cuda_allocated_mib": {on_gpu[0]:.1f}, "cuda_reserved_mib": {on_gpu[1]:.1f}'

    def _run(self) -> None:
        last_record = 0.0
        while True:
            before = monotonic()
            if self._stop.wait(INTERVAL):
                return
            after = monotonic()
            self._late += max(0.0, after - before - INTERVAL)
            try:
                self.beat()
                if after - last_record >= RECORD_EVERY:
                    last_record = after
                    self._resident = f"{resident_mib():.1f}"
                    self.record()
            except OSError:  # no file can be opened or written now; a later beat tries again
                continue
            except Exception:  # a silent heartbeat would look like a held GIL
                traceback.print_exc()
            if self._is_to_rest() and self._stop.wait(REST_S):
                return

    def beat(self) -> None:
        """Beat once: record the main thread's line and completed collectives, and update the counters."""
        board = self.board
        if len(sys.modules) != self._modules:  # an import is under way
            self._modules = len(sys.modules)
            board.add("progress")
        line, place, stacks = self._look_at_frames()
        if line:
            if len(self._lines) < MOST_LINES:
                self._lines[line] = None
            board.text("line", line)
            board.number("line_time", wall_clock())
        self.recorder.poll()
        if self._owes_line:
            self._owes_line, self._changed = False, monotonic()
            self.record(at=board.phase_since)
        if self._look_at_stall(place):
            if self.on_stall is not None:
                self.on_stall()
            self._answer()
            if stacks:
                self._write_stall(stacks)
        board.number("gil_late", self._late)
        board.number("beat_time", wall_clock())
        board.number("beat_monotonic", monotonic())
        board.add("beat")

    def _look_at_frames(self) -> tuple[str, Place | None, str]:
        """Return the main thread's line and innermost place, and all stacks if they are due; ('', None, '') if the rank moves."""
        if self.board.moves != self._moves_seen:
            return "", None, ""
        is_due = self._is_due()
        stacks = look(None if is_due else self._main)
        stacks.pop(threading.get_ident(), None)
        places = stacks.get(self._main or 0, [])
        line = next((describe_line(p.code, p.line) for p in places if is_user_file(p.code.co_filename)), "")
        return line, next(iter(places), None), as_dump(stacks, self._main or 0) if is_due else ""

    def _is_due(self) -> bool:
        """Return whether the stacks of a stall should be written now."""
        since, limit = (self._written, STALL_AGAIN_S) if self._written else (self._since, STALL_S)
        return monotonic() - since >= limit

    def _look_at_stall(self, place: Place | None) -> bool:
        """Count the looks of a stall; return whether the rank is still stalled."""
        now, moves = monotonic(), self.board.moves
        if moves != self._moves_seen:
            self._moves_seen, self._since, self._written = moves, now, 0.0
            self._place, self._looks, self._moves = (0, 0), 0, 0
            self._lines.clear()
            self.board.number("still_looks", 0)
            return False
        if place is not None:
            self._looks += 1
            at = id(place.code), place.instruction
            self._moves += at != self._place or place.is_between_calls  # Python runs, wherever it is found
            self._place = at
            self.board.number("still_looks", self._looks)
            self.board.number("still_moves", self._moves)
        return True

    def _answer(self) -> None:
        """Write the counters of loops once per request of the monitor, and delete the request."""
        request = self._stall.with_name(REQUEST)
        if os.path.exists(request):
            self._has_answered = True
            write_counters(request.parent, self._main or 0)
            with contextlib.suppress(OSError):
                os.unlink(request)

    def _is_to_rest(self) -> bool:
        """Return whether the monitor is about to dump the stacks of a stalled rank: a dump by signal while this thread runs Python,
        with incomplete frames, may end the process.
        """
        if not self._has_answered or self.rests:
            return False
        self.rests = os.path.exists(self._stall.parent / DUMP_REQUEST)
        return self.rests

    def _write_stall(self, stacks: str) -> None:
        """Replace stall.json: stacks, lines, handled exception, asyncio tasks and keys of the stall."""
        now = monotonic()
        self._written = now
        found = {
            "schema": SCHEMA, "time": wall_clock(), "since": wall_clock() - (now - self._since), "stacks": stacks,
            "lines": list(self._lines),
            "handles": handled_exception(self._main or 0), "asyncio": asyncio_tasks(self._main or 0),
            "keys": self.recorder.stores.keys_set.rows(),
        }  # fmt: skip
        with contextlib.suppress(OSError):  # a full disk, or a deleted folder: the test continues
            write_atomically(self._stall, dumps(found))
            dump_flight_recorder(self._stall.with_name("flight_recorder.json"))


def dump_flight_recorder(path: Path) -> bool:
    """Write the recorder's entries as JSON; return False if torch has no recorder, or it is off."""
    module = torch._C._distributed_c10d
    dump = next((getattr(module, name) for name in DUMPS if hasattr(module, name)), None)
    has_buffer = any(os.environ.get(name, "0") not in ("", "0") for name in BUFFER_VARIABLES)
    if dump is None or not has_buffer:
        return False
    try:
        text = dump(includeCollectives=True, onlyActive=False)
    except (RuntimeError, TypeError):
        return False
    write_atomically(path, text if isinstance(text, bytes) else str(text))
    return True
