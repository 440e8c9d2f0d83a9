"""File descriptors that a rank reserves, so that its reports can be written even if the test has used up all others."""

from __future__ import annotations

import contextlib
import os

COUNT = 4


class SpareFiles:
    """Reserved descriptors, all of one file in memory."""

    def __init__(self) -> None:
        self._held: list[int] = []
        self._inode = 0

    def hold(self) -> None:
        """Reserve `COUNT` descriptors, or fewer if there are not so many; no-op if they are reserved."""
        if self._held:
            return
        with contextlib.suppress(OSError):
            self._held.append(os.memfd_create("nsa-spare"))
            self._inode = os.fstat(self._held[0]).st_ino
            while len(self._held) < COUNT:
                self._held.append(os.dup(self._held[0]))

    def make_room(self) -> None:
        """Close them if no other descriptor is free, except those that the test has closed and opened as another file."""
        if not self._held:
            return
        try:
            os.close(os.dup(self._held[0]))
        except OSError:
            while self._held:
                fd = self._held.pop()
                with contextlib.suppress(OSError):
                    if os.fstat(fd).st_ino == self._inode:
                        os.close(fd)
