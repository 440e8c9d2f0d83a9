"""A thread that beats: it shows that the interpreter runs, how late it is (the GIL), and the line of the main thread."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from nsa.trace.board import Board
from nsa.trace.collectives import CollectiveRecorder
from nsa.trace.frames import describe, user_frame

INTERVAL = 0.05
RECORD_EVERY = 1.0


class Heartbeat:
    """Beats on the board every 50 ms; appends a line to ``heartbeat_rank{r}.jsonl`` a second and at each new phase."""

    def __init__(
        self,
        board: Board,
        recorder: CollectiveRecorder | None,
        path: str | os.PathLike[str],
        rank: int,
        label: str = "",
    ) -> None:
        self.board = board
        self.recorder = recorder
        self.rank = rank
        self.label = label
        self._file = os.open(Path(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._main = threading.main_thread().ident
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nsa-heartbeat", daemon=True)
        self._late = 0.0

    def start(self) -> None:
        """Begin to beat. The main thread is the one that is watched."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and write a last line."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self.record()
        os.close(self._file)

    def record(self, **more: Any) -> None:
        """Append a line now; one write, so that a killed rank loses at most the line in hand."""
        board = self.board
        line = {
            "time": time.time(), "rank": self.rank, "step": board.count("step"), "phase": board.phase_name,
            "gradients": board.count("gradients"), "modules_entered": board.count("modules_entered"),
            "collectives": board.count("collectives_entered"), "backend": self.label, **more,
        }  # fmt: skip
        os.write(self._file, (json.dumps(line) + "\n").encode())

    def _run(self) -> None:
        last_record = 0.0
        while True:
            before = time.monotonic()
            if self._stop.wait(INTERVAL):
                return
            after = time.monotonic()
            self._late += max(0.0, after - before - INTERVAL)
            self.beat()
            if after - last_record >= RECORD_EVERY:
                last_record = after
                self.record()

    def beat(self) -> None:
        """One beat: the main thread's line, finished collectives, the counters."""
        board = self.board
        frames = sys._current_frames()
        line = describe(user_frame(frames.get(self._main or 0)))
        if line:
            board.text("line", line)
            board.number("line_time", time.time())
        if self.recorder is not None:
            self.recorder.poll()
        board.number("gil_late", self._late)
        board.number("beat_time", time.time())
        board.add("beat")
