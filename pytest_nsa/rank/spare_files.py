"""Descriptors that a rank holds while its test runs: what reports it is still written where the test has used up all others."""

from __future__ import annotations

import contextlib
import os

COUNT = 4


class SpareFiles:
    """Held while a process lives: descriptors of one file in memory."""

    def __init__(self) -> None:
        self._held: list[int] = []
        self._inode = 0

    def hold(self) -> None:
        """Take them, where none are held; as many as there are, at most COUNT."""
        if self._held:
            return
        with contextlib.suppress(OSError):
            self._held.append(os.memfd_create("nsa-spare"))
            self._inode = os.fstat(self._held[0]).st_ino
            while len(self._held) < COUNT:
                self._held.append(os.dup(self._held[0]))

    def make_room(self) -> None:
        """Close them if no descriptor is free; but not what the test has closed, and perhaps opened as another file."""
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
