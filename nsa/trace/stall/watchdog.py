"""Dump every thread's stack when a training run is stalled, even while C++ holds the GIL."""

import faulthandler
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from nsa.trace import memory
from nsa.trace.board import Board
from nsa.trace.files import open_to_append
from nsa.trace.gradients import report_missing
from nsa.trace.stall.stacks import as_dump, look

CLOSE_S = 2.0  # for a look that is under way
GRACE_S = 5.0  # after it, the GIL counts as held, and faulthandler writes the stacks


class Watchdog:
    """Fed once per step; if it is not fed for ``seconds``, it writes ``watchdog_stackdump_rank{r}_{time}.txt``.

    Its thread writes the stacks and the state of the step, from the ``board``, and dumps the memory; every ``seconds`` the stacks
    again. Parameters without a gradient in a backward (``missing`` returns them) are written there, to the log, and to
    all_missing_params.txt. If that thread cannot run, because C++ holds the GIL, faulthandler writes the stacks, `GRACE_S` later.
    faulthandler needs no GIL, but reading frames of threads that run Python may end the process (SIGSEGV).
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        seconds: float,
        board: Board,
        missing: Callable[[], list[str]],
        mark: str = "",
    ) -> None:
        self.seconds, self.rank, self.board, self.folder, self.missing = seconds, rank, board, folder, missing
        self._mark = mark  # of the memory dump's name
        self.path = folder / f"watchdog_stackdump_rank{rank}_{time.strftime('%Y%m%dT%H%M%S')}.txt"
        self._file: IO[str] | None = None
        self._fed = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._watch, name="nsa-watchdog", daemon=True)

    def feed(self) -> None:
        """Restart the countdown, when a step begins."""
        if self.seconds <= 0:
            return
        if self._file is None:
            self._file = os.fdopen(open_to_append(self.path), "a", encoding="utf-8", buffering=1)
            self._thread.start()
        self._fed.set()
        self._dump_where_the_lock_is_held()

    def close(self) -> None:
        """Stop watching; an empty dump file is removed."""
        if self._file is not None:
            self._closed = True
            self._fed.set()
            self._thread.join(CLOSE_S)
            faulthandler.cancel_dump_traceback_later()
            if self._thread.is_alive():  # CUDA's allocator, which it queries, may be locked
                return
            self._file.close()
            if self.path.stat().st_size == 0:
                self.path.unlink()
            self._file = None

    def _watch(self) -> None:
        while not self._closed:
            self._fed.clear()
            if self._closed:
                return
            is_first = True
            while not self._fed.wait(self.seconds) and self._file is not None:
                faulthandler.cancel_dump_traceback_later()
                self._report(self._file, is_first=is_first)
                is_first = False
                self._dump_where_the_lock_is_held()

    def _dump_where_the_lock_is_held(self) -> None:
        if self._file is not None:
            faulthandler.dump_traceback_later(self.seconds + GRACE_S, file=self._file)

    def _report(self, file: IO[str], *, is_first: bool) -> None:
        stacks = look()
        stacks.pop(threading.get_ident(), None)
        file.write(as_dump(stacks, threading.main_thread().ident or 0) + "\n\n")
        if is_first:
            lines = [f"[watchdog] rank {self.rank} has been stalled for {self.seconds:.0f} s{self._what()}"]
            file.write("".join(f"{line}\n" for line in (*lines, *self._report_missing(), "")))
            memory.dump(self.folder, self.board.count("step"), self.rank, "stall", self._mark)

    def _report_missing(self) -> list[str]:
        """Log the report of missing gradients that the backward would have made at its end, and return its lines."""
        missing, step = self.missing(), self.board.count("step")
        if not missing:
            return []
        arrived = self.board.count("gradients_expected") - len(missing)
        return report_missing("in_backward", step, arrived, missing, self.folder / "all_missing_params.txt", self.rank)

    def _what(self) -> str:
        count = self.board.count
        text = f": {self.board.phase_name} of step {count('step')}, {count('modules_entered')} modules called, "
        text += f"{count('gradients')} of {count('gradients_expected')} gradients arrived, "
        return text + f"{count('collectives_left')} of {count('collectives_entered')} collectives left"
