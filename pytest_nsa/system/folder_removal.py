"""Folders with all that is in them, removed by descriptors: no link is followed, and nothing that is mounted there is touched."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_folder(name: str | Path, within: int | None = None) -> int:
    """Return a descriptor of a folder. Raises OSError; for a link, too."""
    return os.open(name, _FOLDER, dir_fd=within)


def has_mounts(folder: Path) -> bool:
    """Return whether something is mounted at a folder or below it; True where the kernel does not show what is mounted."""
    try:
        with open("/proc/self/mountinfo", "rb", buffering=0) as file:
            lines = os.fsdecode(file.readall()).splitlines()
        real = os.path.realpath(folder)
    except OSError:
        return True
    return any(f"{_unescaped(line.split()[4])}/".startswith(f"{real}/") for line in lines)


def _unescaped(path: str) -> str:
    """Return a path of mountinfo, which writes spaces and the like as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)


def remove_tree(folder: Path) -> bool:
    """Remove a folder and what is in it, unless something is mounted there, and what lies on another file system. Return whether
    all of it has gone.
    """
    if has_mounts(folder):
        return False
    with contextlib.suppress(OSError, RecursionError):  # deeper than descriptors reach
        fd = open_folder(folder)
        try:
            _empty(fd, os.fstat(fd).st_dev)
        finally:
            os.close(fd)
        folder.rmdir()
        return True
    return False


def _empty(folder: int, device: int) -> None:
    with os.scandir(folder) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_folder in found:
        with contextlib.suppress(OSError):
            if not is_folder:
                os.unlink(name, dir_fd=folder)
                continue
            inner = open_folder(name, folder)
            try:
                if os.fstat(inner).st_dev != device:
                    continue
                _empty(inner, device)
            finally:
                os.close(inner)
            os.rmdir(name, dir_fd=folder)
