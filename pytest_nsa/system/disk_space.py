"""Room for evidence: what a folder can hold, space that is set aside before it is needed, and a place of one's own."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pytest_nsa.system.prctl import set_aside

NEEDED = 4 << 20  # bytes that a folder must have room for
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM})
_UNLIMITED = 1 << 62


@contextlib.contextmanager
def where_there_is_room() -> Iterator[None]:
    """Write what can be done without: a full disk, or a file that may not grow, ends nothing."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise


def largest_file() -> int:
    """Return how many bytes a file of this process may have (`ulimit -f`)."""
    soft = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return soft if soft != resource.RLIM_INFINITY else _UNLIMITED


def check_room(folder: Path) -> None:
    """Raise OSError where ``folder`` cannot be written to, or has no room: by writing, as a quota shows in nothing else."""
    probe = folder / f".room.{os.getpid()}"
    try:
        reserve(probe, NEEDED)
    finally:
        probe.unlink(missing_ok=True)


def check_space(folder: Path) -> None:
    """Raise OSError where the disk of ``folder`` is full, or nearly so."""
    usage = os.statvfs(folder)
    if usage.f_bavail * usage.f_frsize < NEEDED:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


def reserve(path: Path, size: int, *, keep_size: bool = False) -> None:
    """Make a file that has its space on the disk: ``size`` bytes of zeros, or with ``keep_size`` none yet, to append to.

    Raises OSError where there is no room. Up to the limit of `ulimit -f`.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        size = min(size, largest_file())
        if not keep_size:
            os.posix_fallocate(fd, 0, size)
        elif (number := set_aside(fd, size)) in NO_ROOM:  # another error: a file system that knows no such thing
            raise OSError(number, os.strerror(number), str(path))
    finally:
        os.close(fd)


def private_folder() -> Path:
    """Make a folder for files of this user's, which no other user reaches. Raises PermissionError when another user has made it."""
    return own_folder(private_path())


def private_path() -> Path:
    """Return where `private_folder` is or would be: in the first place that has room. Raises OSError without any."""
    for base in (Path(tempfile.gettempdir()), Path("/dev/shm")):
        with contextlib.suppress(OSError):
            check_space(base)
            return base / f"pytest-nsa-{os.getuid()}"
    return Path(tempfile.gettempdir()) / f"pytest-nsa-{os.getuid()}"


def own_folder(folder: Path) -> Path:
    """Make a folder that no other user reaches. Raises PermissionError when another user has made it."""
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()  # not what another user's link leads to
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
        raise PermissionError(
            errno.EPERM, "belongs to another user; remove it, or set XDG_RUNTIME_DIR or TMPDIR", str(folder)
        )
    return folder


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, so that other users cannot write into them, whatever the umask."""
    if folder.is_dir():
        return
    if folder.parent != folder:
        make_folder(folder.parent)
    try:
        folder.mkdir()
    except FileExistsError:
        if not folder.is_dir():
            raise
        return  # another process has made it
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & stat.S_IWOTH:  # no umask: what it would keep from the group is not known
        folder.chmod(mode & ~(stat.S_IWGRP | stat.S_IWOTH))


def owner_in(folder: Path) -> int:
    """Return the user that owns what this process makes in a folder.

    Some file systems have another owner for every file: NFS for root, those that a machine shares with its containers.
    """
    try:
        made = tempfile.mkdtemp(prefix=".owner.", dir=folder)
    except OSError:
        return os.getuid()
    try:
        return os.lstat(made).st_uid
    finally:
        os.rmdir(made)


def check_owner(folder: Path) -> None:
    """Raise PermissionError for a folder in a shared place that another user has made, and for a link."""
    status = folder.lstat()
    is_own = status.st_uid == os.getuid() or status.st_uid == owner_in(folder.parent)
    if not is_own or not stat.S_ISDIR(status.st_mode):
        raise PermissionError(errno.EPERM, "another user has made it", str(folder))
