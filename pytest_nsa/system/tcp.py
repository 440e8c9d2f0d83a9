"""Bytes that wait in a process's TCP sockets, received and not read, or written and not acknowledged; and a port that is free."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

_INODE = re.compile(r"socket:\[(\d+)\]")


def socket_queues(pid: int) -> dict[str, int]:
    """{'fds', 'sockets', 'unread_bytes', 'unsent_bytes'} of a process; {} where the kernel does not show them."""
    try:
        entries = list(os.scandir(f"/proc/{pid}/fd"))
    except OSError:
        return {}
    inodes = set()
    for entry in entries:
        try:
            match = _INODE.match(os.readlink(entry.path))
        except OSError:
            continue
        if match:
            inodes.add(match[1])
    unread = unsent = count = 0
    for name in ("tcp", "tcp6"):
        try:
            rows = Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            cells = row.split()
            if len(cells) > 9 and cells[9] in inodes:
                sent, _, received = cells[4].partition(":")
                count, unsent, unread = count + 1, unsent + int(sent, 16), unread + int(received, 16)
    return {"fds": len(entries), "sockets": count, "unread_bytes": unread, "unsent_bytes": unsent}


def free_port() -> int:
    """Return a port of this machine's loopback interface that no process listens on now; 0 where there is no such interface."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", 0))
        except OSError:
            return 0
        return int(probe.getsockname()[1])
