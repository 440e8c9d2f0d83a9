"""What is written into a folder of evidence: appended to, or replaced as a whole. No link that is in it is followed."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


def open_to_append(path: str | os.PathLike[str]) -> int:
    """Return a descriptor that appends to a file, which is made where there is none. Raises OSError; for what is a link, too."""
    return os.open(path, _FLAGS | os.O_APPEND, 0o666)


def write_atomically(path: Path, content: str | bytes, *, follow: bool = False, synced: bool = False) -> None:
    """Put ``content`` in the place of ``path``: a reader sees the old file or the new one. Raises OSError.

    With ``follow`` the folder of ``path`` may be a link: one that the user has named. With ``synced`` the new file is on the disk
    before it takes the place of the old one.
    """
    data = memoryview(content.encode(errors="backslashreplace") if isinstance(content, str) else content)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    try:
        partial = f".{path.name}.{os.urandom(8).hex()}.partial"
        fd = os.open(partial, _FLAGS | os.O_EXCL, 0o666, dir_fd=folder)
        try:
            try:
                while data:
                    data = data[os.write(fd, data) :]
                if synced:
                    os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(partial, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(partial, dir_fd=folder)
            raise
        if synced:
            os.fsync(folder)
    finally:
        os.close(folder)
