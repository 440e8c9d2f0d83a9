"""Sockets between this user's processes, in a folder that no other user can reach."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

BACKLOG = 4096  # connections that may wait: a zygote accepts them once it has collected its tests


class Listener:
    """A listening ``socket``, and its ``name`` for `connect`."""

    def __init__(self, purpose: str) -> None:
        self._folder = tempfile.mkdtemp(prefix=f"pytest-nsa-{purpose}-")  # mode 0700
        self.name = str(Path(self._folder) / "socket")
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with _read_address(self.name) as address:
            self.socket.bind(address)
        self.socket.listen(BACKLOG)

    def close(self) -> None:
        """Close the socket, and remove its name."""
        self.socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def connect(name: str) -> socket.socket:
    """Connect to a `Listener`. Raises OSError if no process listens."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _read_address(name) as address:
            connection.connect(address)
    except OSError:
        connection.close()
        raise
    return connection


@contextlib.contextmanager
def _read_address(name: str) -> Iterator[str]:
    """Yield a short address for a socket's path: an address has at most 107 bytes, and a temporary folder's path may be longer."""
    folder = os.open(os.path.dirname(name), os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{os.path.basename(name)}"
    finally:
        os.close(folder)
