"""The lines that the processes of a test are at. They write their stacks at a signal, if they are forks or have imported torch."""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from pytest_nsa.evidence.stacks import Frame, ThreadStack, parse_dump
from pytest_nsa.observe.second_look import dump_stacks
from pytest_nsa.report.plain import visible
from pytest_nsa.report.terminal import short_place
from pytest_nsa.system.commands import command_line
from pytest_nsa.system.descendants import MOST, Process
from pytest_nsa.system.procfs import catches, how_it_ended
from pytest_nsa.wire.files import open_to_append

FILE, SIGNAL = "stacks.txt", getattr(signal, "SIGRTMIN", 34) + 6  # as nsa.trace.job_folders has them
MOST_THREADS = 3
COMMAND = 100  # characters
_KINDS = {
    "from multiprocessing.spawn import": "a child by multiprocessing's spawn",
    "from multiprocessing.forkserver import": "a child by multiprocessing's fork server",
}


class ChildStacks:
    """Registers faulthandler in this process, so that forks inherit it. Each dump is appended to a file in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / FILE
        self._fd = open_to_append(self._file)
        faulthandler.register(SIGNAL, file=self._fd, all_threads=True, chain=False)

    def close(self) -> None:
        """Undo the registration."""
        faulthandler.unregister(SIGNAL)
        os.close(self._fd)

    def places(self, pid: int) -> list[str]:
        """Return the line of each thread that runs the user's code, the main thread's first; [] where the process shows none."""
        if not catches(pid, SIGNAL):
            return []  # the signal would end it
        began = self._file.stat().st_size
        with contextlib.suppress(ProcessLookupError):
            dump_stacks({pid: self._file}, lambda of: os.kill(of, SIGNAL))
        with self._file.open("rb") as file:
            file.seek(began)
            threads = parse_dump(file.read().decode(errors="replace"))
        frames = [frame for thread in sorted(threads, key=lambda t: not t.is_main) if (frame := _shown(thread))]
        return list(dict.fromkeys(_place(frame) for frame in frames))[:MOST_THREADS]


def _shown(thread: ThreadStack) -> Frame | None:
    """Return the innermost frame of the user's code; of a main thread without one, the innermost frame."""
    # Below multiprocessing's _bootstrap are the frames of the parent.
    own = itertools.takewhile(
        lambda f: not f.file.endswith("/multiprocessing/process.py") or f.function != "_bootstrap", thread.frames
    )
    user = next((frame for frame in own if frame.is_user), None)
    return user or (thread.frames[0] if thread.is_main else None)


def _place(frame: Frame) -> str:
    if frame.is_user:
        return short_place(frame.describe())
    return f"{'/'.join(frame.file.split('/')[-2:])}:{frame.line} in {frame.function}"


def named(process: Process, places: Sequence[str] = ()) -> str:
    """Return a process in one line: its number, state and command, and the ``places`` that it is at."""
    if process.has_ended:
        return f"pid {process.pid} has failed ({how_it_ended(process.status)}), and was not waited for"
    command = process.command
    kind = next((kind for part, kind in _KINDS.items() if part in command), "")
    shown = kind or " ".join(visible(command).split())[:COMMAND]
    if command == command_line(os.getpid(), MOST):
        shown = "a fork of this session"
    at = f": at {'; a thread at '.join(places)}" if places else ""
    return f"pid {process.pid} ({process.state}) {shown}{at}"
