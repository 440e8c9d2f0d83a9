"""Leases of GPUs and cores, each for one test at a time on this machine: lock files that the kernel frees when their holder dies.

A process that waits holds a ticket. Only the oldest ticket of a live process takes resources, and it takes all that it needs or
none. So tests are served in order, and no two wait for each other. This works between the workers of a run and the runs of a user.

A GPU's memory is lent in parts of `PART` bytes, with a lock file per part: a test that names its memory shares the GPU with others
that do, as long as all fit. A test that names no memory gets the whole GPU.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pytest_nsa.system.clock import monotonic
from pytest_nsa.system.disk_space import own_folder

PART = 1 << 30
POLL_S = 0.05
FIRST_WORD_S = 1.0
NEXT_WORD_S = 15.0
LAST_RANKS_S = 1.0


def _runtime_folder() -> Path | None:
    """Return the folder for runtime files of this user's processes; None if the system names none."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) if base and os.access(base, os.W_OK) else None


def default_folder() -> Path:
    """Make and return the folder of this user's lock files. Raises PermissionError if another user has made it."""
    return own_folder(folder_of_leases())


def folder_of_leases() -> Path:
    """Return the folder of this user's lock files, whether it exists or not."""
    base = _runtime_folder()
    return base / "pytest-nsa" if base else Path(tempfile.gettempdir()) / f"pytest-nsa-{os.getuid()}"


@dataclass(kw_only=True)
class Lease:
    """The resources that a test was given, by ``names``; released by `release`, or by the kernel. ``in_use``: the files that its
    ranks lock while they live.
    """

    names: tuple[str, ...] = ()
    in_use: tuple[str, ...] = ()
    _locks: list[_Lock] = field(default_factory=list)

    def release(self) -> None:
        """Release all resources."""
        for lock in self._locks:
            lock.release()
        self._locks.clear()


@dataclass(kw_only=True)
class Broker:
    """Leases of one kind, 'gpu' or 'core'. ``names`` are all that this machine has."""

    folder: Path
    kind: str
    names: Sequence[str]
    _lent: set[Path] = field(default_factory=set)  # files that ranks of this process hold while they live

    def lease(
        self, count: int, *, share: bool, holder: str, report: Callable[[str], None], parts: int = 0, of: int = 0
    ) -> Lease:
        """Wait for ``count`` resources, or for ``parts`` of the ``of`` parts of each. ``report`` is called with a text while it
        waits.

        Raises ValueError if this machine has fewer.
        """
        if count > len(self.names):
            raise ValueError(f"needs {count} {self.kind}s, this machine has {len(self.names)}")
        with self._ticket() as ticket:
            began = reported = monotonic()
            while True:
                if self._is_first(ticket):
                    lease = self._take(count, share, holder, parts, of)
                    if lease is not None:
                        return lease
                now = monotonic()
                if now - reported >= (NEXT_WORD_S if reported > began else FIRST_WORD_S):
                    reported = now
                    report(
                        f"{holder} waits for {count} of {len(self.names)} {self.kind}s, {now - began:.0f} s; {self._held()}"
                    )
                time.sleep(POLL_S)

    def clean_up(self) -> None:
        """Remove the files that no process holds."""
        deadline = monotonic() + LAST_RANKS_S
        while not all(_Lock.is_free(path) for path in self._lent) and monotonic() < deadline:
            time.sleep(0.01)  # the last ranks of this process are about to end
        for path in self.folder.glob(f"{self.kind}-*"):
            _Lock.is_free(path)
        with contextlib.suppress(OSError):
            self.folder.rmdir()  # empty: no other process uses it

    def _take(self, count: int, share: bool, holder: str, parts: int = 0, of: int = 0) -> Lease | None:
        """Return a lease of all that is needed, or None, without waiting."""
        locks: list[_Lock] = []
        taken, uses = [], []
        for name in self.names:
            found = self._take_one(name, share, parts, of)
            if found is None:
                continue
            locks += found[0]
            uses += found[1]
            taken.append(name)
            if len(taken) == count:
                for held in locks:
                    held.write(f"{os.getpid()} {holder}")
                self._lent.update(uses)
                return Lease(names=tuple(taken), in_use=tuple(map(str, uses)), _locks=locks)
        for lock in locks:
            lock.release()
        return None

    def _take_one(self, name: str, share: bool, parts: int, of: int) -> tuple[list[_Lock], list[Path]] | None:
        """Return the locks of one resource, and the files that its ranks will hold; None if it is not free now."""
        lock = _Lock(self._path(name))
        if not lock.try_lock(share=share or parts > 0):
            return None
        # Ranks of a killed host may live for a moment longer: they hold the second file.
        in_use = [self._use_path(name), *self.folder.glob(self._use_path(f"{name}-part*").name)]
        if parts == 0:
            if share or all(_Lock.is_free(path) for path in in_use):
                return [lock], [self._use_path(name)]
        elif _Lock.is_free(self._use_path(name)):
            locks, uses = [lock], []
            for number in range(of):
                part, use = _Lock(self._path(f"{name}-part{number}")), self._use_path(f"{name}-part{number}")
                if part.try_lock(share=False):
                    if _Lock.is_free(use):
                        locks.append(part)
                        uses.append(use)
                    else:
                        part.release()
                if len(uses) == parts:
                    return locks, uses
            for held in locks[1:]:
                held.release()
        lock.release()
        return None

    def _held(self) -> str:
        """Return a text that names the holders, for the test that waits."""
        holders = {}
        for name in self.names:
            with contextlib.suppress(OSError):
                pid, _, test = self._path(name).read_text().partition(" ")
                if pid:
                    holders[name] = f"{test} (process {pid})"
        tests = dict.fromkeys(holders.values())
        return f"held by {', '.join(tests)}" if tests else "others wait before it"

    def _path(self, name: str) -> Path:
        return self.folder / f"{self.kind}-{name.replace(os.sep, '_')}.lock"

    def _use_path(self, name: str) -> Path:
        return self.folder / f"{self.kind}-{name.replace(os.sep, '_')}.use"

    @contextlib.contextmanager
    def _ticket(self) -> Iterator[Path]:
        """Hold a place in the queue, for as long as this process waits."""
        path = self.folder / f"{self.kind}-ticket-{time.time_ns():020d}-{os.getpid()}"
        lock = _Lock(path)
        while not lock.try_lock(share=False):  # another process is checking whether it is free
            time.sleep(0.001)
        try:
            yield path
        finally:
            lock.release()

    def _is_first(self, ticket: Path) -> bool:
        for other in sorted(self.folder.glob(f"{self.kind}-ticket-*")):
            if other.name >= ticket.name:
                return True
            if not _Lock.is_free(other):
                return False
        return True


class _Lock:
    """A lock file that exists only while a process holds it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1
        self._share = False

    def try_lock(self, *, share: bool) -> bool:
        """Lock it without waiting; return whether that succeeded."""
        while True:
            try:
                fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:  # the last holder of a lock has just removed the folder
                self.path.parent.mkdir(mode=0o700, exist_ok=True)
                continue
            try:
                fcntl.flock(fd, (fcntl.LOCK_SH if share else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except OSError:
                os.close(fd)
                return False
            # Its last holder may have removed the file between our opening and locking it.
            with contextlib.suppress(OSError):
                if os.stat(self.path).st_ino == os.fstat(fd).st_ino:
                    self._fd, self._share = fd, share
                    return True
            os.close(fd)

    def write(self, text: str) -> None:
        """Write the holder into it."""
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, text.encode(errors="replace"), 0)

    def release(self) -> None:
        """Remove the file and free the lock. Shared ones are removed by the process that finds them free."""
        if self._fd < 0:
            return
        with contextlib.suppress(OSError):
            if self._share:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while others share it
            self.path.unlink()
        os.close(self._fd)
        self._fd = -1

    @staticmethod
    def is_free(path: Path) -> bool:
        """Return whether no process holds it; remove the file of a dead process."""
        lock = _Lock(path)
        if not path.exists():
            return True
        if not lock.try_lock(share=False):
            return False
        lock.release()
        return True


def hold_while_alive(paths: Sequence[str]) -> list[_Lock]:
    """In a rank, mark resources as in use while this process lives and keeps the returned locks."""
    held = [_Lock(Path(path)) for path in paths]
    for lock in held:
        while not lock.try_lock(share=True):  # another process is checking whether it is free
            time.sleep(0.001)
    return held
