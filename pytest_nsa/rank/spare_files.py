"""Descriptors that a rank holds while its test runs: what reports it is still written where the test has used up all others."""

from __future__ import annotations

import contextlib
import os

COUNT = 8


class SpareFiles:
    """Held from a test's begin until its report, or its first exception."""

    def __init__(self) -> None:
        self._held: list[tuple[int, int]] = []  # descriptor and inode

    def hold(self) -> None:
        """Take them; as many as there are, at most COUNT."""
        with contextlib.suppress(OSError):
            while len(self._held) < COUNT:
                fd = os.memfd_create("nsa-spare")
                self._held.append((fd, os.fstat(fd).st_ino))

    def release(self) -> None:
        """Close them, but not what the test has closed, and perhaps opened as another file."""
        while self._held:
            fd, inode = self._held.pop()
            with contextlib.suppress(OSError):
                if os.fstat(fd).st_ino == inode:
                    os.close(fd)
