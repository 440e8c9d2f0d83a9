"""Sockets between this user's processes: no file and no port, only a name in the kernel's abstract namespace.

Any process of the machine can reach such a name, so both ends query the kernel for the user at the other end.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct

BACKLOG = 128


def listen(purpose: str) -> tuple[str, socket.socket]:
    """Return a listening socket, and its name for `connect`."""
    name = f"pytest-nsa-{purpose}-{os.getpid()}-{secrets.token_hex(8)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind("\0" + name)
    listener.listen(BACKLOG)
    return name, listener


def accept(listener: socket.socket) -> socket.socket | None:
    """Return the next connection; None when it is not this user's."""
    connection, _ = listener.accept()
    if _peer_user(connection) == os.getuid():
        return connection
    connection.close()
    return None


def connect(name: str) -> socket.socket:
    """Connect to what `listen` made. Raises OSError when no process listens, PermissionError when it is another user."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect("\0" + name)
        if _peer_user(connection) != os.getuid():
            raise PermissionError(f"the socket {name} belongs to another user")
    except OSError:
        connection.close()
        raise
    return connection


def _peer_user(connection: socket.socket) -> int:
    """Return the user id of the process at the other end, by the kernel."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1]
