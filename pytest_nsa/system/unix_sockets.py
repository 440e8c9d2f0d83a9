"""Sockets between this user's processes, in a folder that no other user can reach, so that no other can connect or fill the queue.

Both ends also check, by the kernel, which user is at the other end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from pytest_nsa.system.clock import monotonic

BACKLOG = 4096  # connections that may wait: a zygote accepts them once it has collected its tests
CONNECT_S = 60.0
AGAIN_S = 0.05


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


def accept(listener: socket.socket) -> socket.socket | None:
    """Return the next connection; None if it is another user's."""
    connection, _ = listener.accept()
    if _peer_user(connection) == os.getuid():
        return connection
    connection.close()
    return None


def connect(name: str) -> socket.socket:
    """Connect to a `Listener`. Raises OSError if no process listens, PermissionError if another user listens, and TimeoutError
    if its queue has no place within `CONNECT_S` seconds.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _read_address(name) as address:
            _connect(connection, address, CONNECT_S)
        if _peer_user(connection) != os.getuid():
            raise PermissionError(f"the socket {name} belongs to another user")
    except OSError:
        connection.close()
        raise
    return connection


def _connect(connection: socket.socket, address: str, limit_s: float) -> None:
    """Connect, and retry while the queue is full: a blocking connect has no limit, one with a timeout fails at once."""
    deadline = monotonic() + limit_s
    connection.setblocking(False)
    while True:
        try:
            connection.connect(address)
            break
        except BlockingIOError:
            if monotonic() >= deadline:
                raise TimeoutError(f"no connection was accepted within {limit_s:g} s") from None
            time.sleep(AGAIN_S)
    connection.setblocking(True)


@contextlib.contextmanager
def _read_address(name: str) -> Iterator[str]:
    """Yield a short address for a socket's path: an address has at most 107 bytes, and a temporary folder's path may be longer."""
    folder = os.open(os.path.dirname(name), os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{os.path.basename(name)}"
    finally:
        os.close(folder)


def _peer_user(connection: socket.socket) -> int:
    """Return the user id of the process at the other end, by the kernel."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1]
