"""Dumps every thread's stack when a training run is stalled; works while C++ holds the GIL."""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from pathlib import Path
from typing import IO

from nsa.trace.board import Board
from nsa.trace.files import open_to_append


class Watchdog:
    """Fed once a step; unfed for ``seconds``, it writes ``watchdog_stackdump_rank{r}_{time}.txt``.

    The stacks are written by faulthandler's C thread, which needs neither the GIL nor a Python signal handler to run; what
    stood still, by a thread of ours beside it, from the ``board``.
    """

    def __init__(self, folder: Path, rank: int, seconds: float, board: Board | None = None) -> None:
        self.seconds, self.rank, self.board = seconds, rank, board
        self.path = folder / f"watchdog_stackdump_rank{rank}_{time.strftime('%Y%m%dT%H%M%S')}.txt"
        self._file: IO[str] | None = None
        self._fed = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._watch, name="nsa-watchdog", daemon=True)

    def feed(self) -> None:
        """A step begins: start counting anew."""
        if self.seconds <= 0:
            return
        if self._file is None:
            self._file = os.fdopen(open_to_append(self.path), "a", encoding="utf-8", buffering=1)
            self._thread.start()
        self._fed.set()
        faulthandler.dump_traceback_later(self.seconds, repeat=True, file=self._file)

    def close(self) -> None:
        """Stop watching; an empty dump file is removed."""
        faulthandler.cancel_dump_traceback_later()
        if self._file is not None:
            self._closed = True
            self._fed.set()
            self._thread.join()
            self._file.close()
            if self.path.stat().st_size == 0:
                self.path.unlink()
            self._file = None

    def _watch(self) -> None:
        while not self._closed:
            self._fed.clear()
            if self._closed:
                return
            if not self._fed.wait(self.seconds) and self._file is not None:
                self._file.write(
                    f"[watchdog] rank {self.rank} has been stalled for {self.seconds:.0f} s{self._what()}\n"
                )
                self._fed.wait()

    def _what(self) -> str:
        if self.board is None:
            return ""
        count = self.board.count
        said = f": {self.board.phase_name} of step {count('step')}, {count('modules_entered')} modules called, "
        said += f"{count('gradients')} of {count('gradients_expected')} gradients arrived, "
        return said + f"{count('collectives_left')} of {count('collectives_entered')} collectives left"
