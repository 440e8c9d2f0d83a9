"""The user's terminal: write to it without pytest's capture, and lend it to a rank's debugger."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
from collections.abc import Iterator

import pytest

from pytest_nsa.system import unix_sockets
from pytest_nsa.system.clock import monotonic
from pytest_nsa.wire.protocols import Monitor


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
        self._listener = unix_sockets.Listener("debugger")
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
