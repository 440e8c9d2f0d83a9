"""Sockets between this user's processes, in a folder that no other user can reach; bytes in TCP sockets, and held ports."""

import contextlib
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from pytest_nsa.system.procfs import open_files, read_proc_text

_INODE = re.compile(r"socket:\[(\d+)\]")


def socket_queues(pid: int) -> dict[str, int]:
    """Return {'sockets', 'unread_bytes', 'unsent_bytes'} of a process; {} if the kernel does not show them."""
    links = open_files(pid)
    if not links:
        return {}
    inodes = {match[1] for match in map(_INODE.match, links) if match}
    unread = unsent = count = 0
    for name in ("tcp", "tcp6"):
        for row in read_proc_text(Path(f"/proc/{pid}/net/{name}")).splitlines()[1:]:
            cells = row.split()
            if len(cells) > 9 and cells[9] in inodes:
                sent, _, received = cells[4].partition(":")
                count, unsent, unread = count + 1, unsent + int(sent, 16), unread + int(received, 16)
    return {"sockets": count, "unread_bytes": unread, "unsent_bytes": unsent}


def hold_ports(count: int = 3) -> list[socket.socket]:
    """Return sockets that hold ports of this machine while they are open; [] without a loopback interface.

    They do not listen, and allow their address to be reused: a server that allows it too, as torch's stores do, can listen on the
    port, while the kernel does not assign it to a process that requests any free port.
    """
    held: list[socket.socket] = []
    for _ in range(count):
        holder = socket.socket()
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind(("127.0.0.1", 0))
        except OSError:
            holder.close()
            break
        held.append(holder)
    return held


def list_numbers(held: Iterable[socket.socket]) -> tuple[int, ...]:
    """Return the ports that `hold_ports` holds."""
    return tuple(int(holder.getsockname()[1]) for holder in held)


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
