"""Remove folders with their content, by descriptors: no link is followed, and nothing that is mounted there is removed."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_folder(name: str | Path, within: int | None = None) -> int:
    """Return a descriptor of a folder. Raises OSError, also for a link."""
    return os.open(name, _FOLDER, dir_fd=within)


def has_mounts(folder: Path) -> bool:
    """Return whether something is mounted at a folder or below it; True if the kernel does not list the mounts."""
    try:
        with open("/proc/self/mountinfo", "rb", buffering=0) as file:
            lines = os.fsdecode(file.readall()).splitlines()
        real = os.path.realpath(folder)
    except OSError:
        return True
    return any(f"{_unescaped(line.split()[4])}/".startswith(f"{real}/") for line in lines)


def _unescaped(path: str) -> str:
    """Return a path of mountinfo with its octal escapes (for spaces and others) decoded."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)


def remove_tree(folder: Path) -> bool:
    """Remove a folder and its content, except content on another file system; no-op if something is mounted there. Return whether
    all of it was removed.
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
