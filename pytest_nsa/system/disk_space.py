"""Disk space for evidence: check a folder, reserve space before it is needed, and make folders private to this user."""

import contextlib
import errno
import os
import resource
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pytest_nsa.system.prctl import reserve_space

NEEDED = 4 << 20  # bytes that a folder must have room for
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM})
_UNLIMITED = 1 << 62


@contextlib.contextmanager
def ignore_full_disk() -> Iterator[None]:
    """Ignore the errors of a full disk, or of a file that may not grow, for data that is not essential."""
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
    """Raise OSError if ``folder`` cannot be written to, or has no room. Tested by writing: a quota is not visible otherwise."""
    probe = folder / f".room.{os.getpid()}"
    try:
        reserve(probe, NEEDED)
    finally:
        probe.unlink(missing_ok=True)


def check_space(folder: Path) -> None:
    """Raise OSError if the disk of ``folder`` is full, or nearly full."""
    usage = os.statvfs(folder)
    if usage.f_bavail * usage.f_frsize < NEEDED:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


def reserve(path: Path, size: int, *, keep_size: bool = False) -> None:
    """Make a file with ``size`` bytes reserved on the disk: filled with zeros, or with ``keep_size`` empty, to append to.

    Reserves at most the limit of `ulimit -f`. Raises OSError if there is no room.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        size = min(size, largest_file())
        if not keep_size:
            os.posix_fallocate(fd, 0, size)
        elif (number := reserve_space(fd, size)) in NO_ROOM:  # for another error, the file system cannot reserve space
            raise OSError(number, os.strerror(number), str(path))
    finally:
        os.close(fd)


def private_folder() -> Path:
    """Make a folder for this user's files, which no other user can reach. Raises PermissionError if another user has made it."""
    return own_folder(private_path())


def private_path() -> Path:
    """Return the path of `private_folder`: in the first place that has room, else in the folder for temporary files."""
    for base in (Path(tempfile.gettempdir()), Path("/dev/shm")):
        with contextlib.suppress(OSError):
            check_space(base)
            return base / f"pytest-nsa-{os.getuid()}"
    return Path(tempfile.gettempdir()) / f"pytest-nsa-{os.getuid()}"


def own_folder(folder: Path) -> Path:
    """Make a folder that no other user can reach. Raises PermissionError if another user has made it."""
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()  # lstat: another user may have made a link
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
        raise PermissionError(
            errno.EPERM, "belongs to another user; remove it, or set XDG_RUNTIME_DIR or TMPDIR", str(folder)
        )
    return folder


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, which other users cannot write to, whatever the umask is."""
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
    if mode & stat.S_IWOTH:  # without a umask, the intended permissions of the group are unknown
        folder.chmod(mode & ~(stat.S_IWGRP | stat.S_IWOTH))
