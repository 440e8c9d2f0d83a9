"""Who is at the other end of the pipe or Unix socket that a process reads from: by /proc, and by the kernel's socket diagnosis."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import socket
import struct
from pathlib import Path

from pytest_nsa.system.procfs import open_files, stat_of

# read, recvfrom, recvmsg: the file descriptor is their first argument.
_READS = {"x86_64": ("0", "45", "47"), "aarch64": ("63", "207", "212")}
_LINK = re.compile(r"(pipe|socket):\[(\d+)\]")
_DIAG, _BY_FAMILY, _REQUEST, _SHOW_PEER, _PEER = 4, 20, 1, 4, 2  # of linux/sock_diag.h, netlink.h and unix_diag.h
_NO_COOKIE = 0xFFFFFFFF


def reads_from_parent(pid: int) -> bool:
    """Return whether a process's main thread reads from a pipe or Unix socket with its parent at the other end.

    False if the kernel does not show the system call (a sandbox, another user's process).
    """
    link = _read_from(pid)
    fields = stat_of(pid)
    if not link or not fields:
        return False
    kind, inode = link
    other = inode if kind == "pipe" else _peer_of(inode)
    return f"{kind}:[{other}]" in open_files(int(fields[1]))


def _read_from(pid: int) -> tuple[str, int] | None:
    """Return kind and inode of the pipe or socket that the main thread reads from; None without one."""
    with contextlib.suppress(OSError):
        call, *arguments = Path(f"/proc/{pid}/syscall").read_text(encoding="ascii").split()
        if call in _READS.get(platform.machine(), ()):
            match = _LINK.fullmatch(os.readlink(f"/proc/{pid}/fd/{int(arguments[0], 16)}"))
            return (match[1], int(match[2])) if match else None
    return None


def _peer_of(inode: int) -> int:
    """Return the inode of the socket that a Unix socket is connected to; 0 without one, or without the kernel's answer."""
    body = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, 0xFFFFFFFF, inode, _SHOW_PEER, _NO_COOKIE, _NO_COOKIE)
    header = struct.pack("=IHHII", 16 + len(body), _BY_FAMILY, _REQUEST, 0, 0)
    with contextlib.suppress(OSError), socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _DIAG) as kernel:
        kernel.settimeout(1.0)
        kernel.send(header + body)
        answer = kernel.recv(1 << 16)
        (kind,) = struct.unpack_from("=H", answer, 4)
        at = 32  # after both headers: attributes, each with its length and kind, aligned to 4 bytes
        while kind == _BY_FAMILY and at + 4 <= len(answer):
            length, name = struct.unpack_from("=HH", answer, at)
            if name == _PEER and at + 8 <= len(answer):
                return int(struct.unpack_from("=I", answer, at + 4)[0])
            at += max((length + 3) & ~3, 4)
    return 0
