"""Leases of GPUs and cores, each for one test at a time on this machine: file locks that the kernel frees when their holder dies.

A test takes all that it needs or none, and tries again after a moment. So no two tests wait for each other; which of several gets a
GPU first is chance. This works between the workers of a run and the runs of a user. The files stay: they are empty or name a test.

A GPU's memory is lent in parts of `PART` bytes, with a lock file per part: a test that names its memory shares the GPU with others
that do, as long as all fit. A test that names no memory gets the whole GPU.
"""

import contextlib
import fcntl
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pytest_nsa.system.clock import monotonic
from pytest_nsa.system.disk_space import own_folder

PART = 1 << 30
POLL_S = 0.1  # at most
FIRST_WORD_S = 1.0
NEXT_WORD_S = 15.0


def folder_of_leases() -> Path:
    """Return the folder of this user's lock files, whether it exists or not."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and os.access(base, os.W_OK):
        return Path(base) / "pytest-nsa"
    return Path(tempfile.gettempdir()) / f"pytest-nsa-{os.getuid()}"


def default_folder() -> Path:
    """Make and return the folder of this user's lock files. Raises PermissionError if another user has made it."""
    return own_folder(folder_of_leases())


@dataclass(kw_only=True)
class Lease:
    """The resources that a test was given, by ``names``; released by `release`, or by the kernel. ``in_use``: the files that its
    ranks lock while they live.
    """

    names: tuple[str, ...] = ()
    in_use: tuple[str, ...] = ()
    _locked: list[int] = field(default_factory=list)  # file descriptors

    def release(self) -> None:
        """Release all resources."""
        while self._locked:
            _unlock(self._locked.pop())


@dataclass(kw_only=True)
class Broker:
    """Leases of one kind, 'gpu' or 'core'. ``names`` are all that this machine has."""

    folder: Path
    kind: str
    names: Sequence[str]

    def lease(
        self, count: int, *, share: bool, holder: str, report: Callable[[str], None], parts: int = 0, of: int = 0
    ) -> Lease:
        """Wait for ``count`` resources, or for ``parts`` of the ``of`` parts of each. ``report`` is called with a text while it
        waits.

        Raises ValueError if this machine has fewer.
        """
        if count > len(self.names):
            raise ValueError(f"needs {count} {self.kind}s, this machine has {len(self.names)}")
        began = reported = monotonic()
        while (lease := self._take(count, share, holder, parts, of)) is None:
            now = monotonic()
            if now - reported >= (NEXT_WORD_S if reported > began else FIRST_WORD_S):
                reported = now
                report(
                    f"{holder} waits for {count} of {len(self.names)} {self.kind}s, {now - began:.0f} s; {self._held()}"
                )
            time.sleep(random.uniform(POLL_S / 4, POLL_S))
        return lease

    def _take(self, count: int, share: bool, holder: str, parts: int = 0, of: int = 0) -> Lease | None:
        """Return a lease of all that is needed, or None, without waiting."""
        lease, taken = Lease(), []
        for name in self.names:
            locked = self._take_one(name, share, parts, of)
            lease._locked += locked
            taken += [name] * bool(locked)
            if len(taken) == count:
                for descriptor in lease._locked:
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, f"{os.getpid()} {holder}".encode(errors="replace"), 0)
                lease.names, lease.in_use = tuple(taken), tuple(str(self._path(name, "use")) for name in taken)
                return lease
        lease.release()
        return None

    def _take_one(self, name: str, share: bool, parts: int, of: int) -> list[int]:
        """Return the locked files of one resource; none if it is not free now."""
        one = _try_lock(self._path(name), share=share or parts > 0)
        if one is None:
            return []
        locked = [one]
        for number in range(of if parts else 0):
            part = _try_lock(self._path(f"{name}-part{number}"))
            locked += [] if part is None else [part]
            if len(locked) > parts:
                return locked
        # Ranks of a killed host may live for a moment longer: they hold the file of use.
        if not parts and (share or not _is_locked(self._path(name, "use"))):
            return locked
        for descriptor in locked:
            _unlock(descriptor)
        return []

    def _held(self) -> str:
        """Return a text that names the holders, for the test that waits."""
        holders = dict[str, None]()
        for path in filter(_is_locked, map(self._path, self.names)):
            pid, _, test = path.read_text().partition(" ")
            holders[f"{test} (process {pid})"] = None
        return f"held by {', '.join(holders)}" if holders else "others take it first"

    def _path(self, name: str, suffix: str = "lock") -> Path:
        return self.folder / f"{self.kind}-{name.replace(os.sep, '_')}.{suffix}"


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _try_lock(path: Path, *, share: bool = False) -> int | None:
    """Lock a file without waiting; return its descriptor, or None if another process holds it."""
    descriptor = _open(path)
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(descriptor, (fcntl.LOCK_SH if share else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        return descriptor
    os.close(descriptor)
    return None


def _unlock(descriptor: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_UN)  # children of this process may have the file open
    os.close(descriptor)


def _is_locked(path: Path) -> bool:
    descriptor = _try_lock(path)
    if descriptor is not None:
        _unlock(descriptor)
    return descriptor is None


def hold_while_alive(paths: Sequence[str]) -> list[int]:
    """In a rank, mark resources as in use while this process lives; return the descriptors of the files."""
    held = [_open(Path(path)) for path in paths]
    for descriptor in held:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    return held
