"""What ranks print: a limit on each one's output, their lines as they come (-s), and a debugger's terminal."""

import contextlib
import os
import select
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_nsa.system import sockets
from pytest_nsa.system.clock import monotonic
from pytest_nsa.system.prctl import punch_hole
from pytest_nsa.wire.files import replacing
from pytest_nsa.wire.messages import Job
from pytest_nsa.wire.protocols import Monitor

BLOCK = 4096


class LiveOutput(Monitor):
    """With -s: shows each line of a rank as it is written, with ``[rank 1]`` in front."""

    def __init__(self, job: Job, write: Callable[[str], None]) -> None:
        self._write = write
        self._paths = {rank: job.rank_folder(rank) / "output.log" for rank in range(job.world_size)}
        self._read = dict.fromkeys(self._paths, 0)
        self._rest = dict.fromkeys(self._paths, b"")
        self._begin = "\n"  # ends pytest's line with the test's name

    def poll(self) -> float:
        """Show the new complete lines."""
        for rank, path in self._paths.items():
            try:
                with path.open("rb") as file:
                    size = file.seek(0, os.SEEK_END)
                    file.seek(min(self._read[rank], size))
                    data = file.read()
                    self._read[rank] = file.tell()
            except OSError:
                continue
            # OutputLimit may punch a hole while this reads: drop the NUL bytes that it leaves.
            *lines, self._rest[rank] = (self._rest[rank] + data.replace(b"\0", b"")).split(b"\n")
            self._show(rank, lines)
        return 0.0

    def finish(self) -> None:
        """Show the rest, also a last line without a newline."""
        self.poll()
        for rank, rest in self._rest.items():
            if rest:
                self._show(rank, [rest])

    def _show(self, rank: int, lines: list[bytes]) -> None:
        if lines:
            begin, self._begin = self._begin, ""
            self._write(begin + "".join(f"[rank {rank}] {line.decode(errors='replace')}\n" for line in lines))


class OutputLimit(Monitor):
    """Limits each rank's output.log to its head and its tail; a line in between reports what was cut.

    While the rank writes, the middle of its file is given back to the file system as a hole, which disturbs no writer;
    once it has ended, the file is rewritten without the hole.
    """

    def __init__(self, job: Job, limit: int) -> None:
        self._limit = limit
        self._paths = [job.rank_folder(rank) / "output.log" for rank in range(job.world_size)]
        self._cut: dict[Path, int] = {}  # where the hole of a file ends

    def poll(self) -> float:
        """Punch a hole into the middle of each file that is over the limit."""
        for path in self._paths:
            with contextlib.suppress(OSError):
                status = path.stat()
                if status.st_blocks * 512 > self._limit and status.st_size > self._limit:
                    self._punch(path, status.st_size)
        return 0.0

    def finish(self) -> None:
        """Rewrite each cut file: head, a line on what is missing, tail."""
        self.poll()
        for path, end in self._cut.items():
            with path.open("rb") as old, replacing(path) as fd, open(fd, "wb", closefd=False) as new:
                new.write(old.read(self._head).rstrip(b"\0"))
                size = old.seek(0, os.SEEK_END)
                start = max(end, size - self._limit // 2)
                note = f"[nsa: {start - self._head} bytes omitted here: ranks_output_limit keeps {self._limit} bytes per rank]"
                new.write(b"\n" + note.encode() + b"\n")
                old.seek(start)
                new.write(old.read().partition(b"\n")[2])
        self._cut.clear()

    @property
    def _head(self) -> int:
        return self._limit // 2 // BLOCK * BLOCK

    def _punch(self, path: Path, size: int) -> None:
        end = (size - self._limit // 4) // BLOCK * BLOCK
        fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if punch_hole(fd, self._head, end - self._head):
                self._cut[path] = end
        finally:
            os.close(fd)


def without_capture(config: pytest.Config) -> contextlib.AbstractContextManager[None]:
    """Return a context in which pytest captures no output."""
    manager = config.pluginmanager.getplugin("capturemanager")
    if manager is None:  # -p no:capture
        return contextlib.nullcontext()
    passed: contextlib.AbstractContextManager[None] = manager.global_and_fixture_disabled()
    return passed


class Terminal:
    """Writes to the user's terminal without pytest's capture, and lends it."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._capture = config.pluginmanager.getplugin("capturemanager")

    def __call__(self, text: str) -> None:
        with without_capture(self._config):
            sys.stdout.write(text)
            sys.stdout.flush()

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Return a context in which pytest captures neither output nor standard input."""
        if self._capture is not None:
            self._capture.suspend(in_=True)
        try:
            yield
        finally:
            if self._capture is not None:
                self._capture.resume()


class DebuggerServer(Monitor):
    """Lends the terminal to the first rank of a job that connects to its Unix socket, which only this user can reach."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._listener = sockets.Listener("debugger")
        self.name = self._listener.name
        self.once = False  # post mortem: one rank per test
        self._served = 0

    def begin(self, *, once: bool) -> None:
        """Reset for the next test."""
        self.once, self._served = once, 0

    def poll(self) -> float:
        """Serve a rank that connects; the others wait for it in their next collective."""
        if not select.select([self._listener.socket], [], [], 0)[0]:
            return 0.0
        with self._listener.socket.accept()[0] as connection:
            if self.once and self._served:
                return 0.0
            self._served += 1
            began = monotonic()
            with self._terminal.lent():
                print("\n>>> a rank is in the debugger; the others wait, and no time limit runs", flush=True)
                self._relay(connection)
            return monotonic() - began

    def close(self) -> None:
        """Accept no more ranks; called at the session's end."""
        self._listener.close()

    def _relay(self, connection: socket.socket) -> None:
        sources: list[socket.socket | int] = [connection, 0]
        while True:
            readable, _, _ = select.select(sources, [], [])
            if connection in readable:
                try:
                    data = connection.recv(1 << 16)
                except ConnectionResetError:
                    return
                if not data:
                    return
                os.write(1, data)
            if 0 in readable:
                typed = os.read(0, 1 << 12)
                with contextlib.suppress(BrokenPipeError):
                    if typed:
                        connection.sendall(typed)
                    else:  # end of file: pdb takes that for quit
                        sources.remove(0)
                        connection.shutdown(socket.SHUT_WR)
