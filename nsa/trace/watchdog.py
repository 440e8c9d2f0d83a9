"""Dumps every thread's stack when a training run stands still; works while C++ holds the GIL."""

from __future__ import annotations

import faulthandler
import time
from pathlib import Path
from typing import IO


class Watchdog:
    """Fed once a step; unfed for ``seconds``, it writes ``watchdog_stackdump_rank{r}_{time}.txt``.

    The timer is faulthandler's C thread, which needs neither the GIL nor a Python signal handler to run.
    """

    def __init__(self, folder: Path, rank: int, seconds: float) -> None:
        self.seconds = seconds
        self.path = folder / f"watchdog_stackdump_rank{rank}_{time.strftime('%Y%m%dT%H%M%S')}.txt"
        self._file: IO[str] | None = None

    def feed(self) -> None:
        """A step begins: start counting anew."""
        if self.seconds <= 0:
            return
        if self._file is None:
            self._file = self.path.open("w", encoding="utf-8")
        faulthandler.dump_traceback_later(self.seconds, repeat=True, file=self._file)

    def close(self) -> None:
        """Stop watching; an empty dump file is removed."""
        faulthandler.cancel_dump_traceback_later()
        if self._file is not None:
            self._file.close()
            if self.path.stat().st_size == 0:
                self.path.unlink()
            self._file = None
