"""Files that survive a killed writer: replaced as a whole, or appended line by line.

All files in a folder of evidence are written by these functions: they follow no link, as another user may have made it.
"""

import contextlib
import errno
import json
import math
import os
import stat
from collections.abc import Iterator
from json import dumps

# Bound at import: a test may replace the functions of os, for example to simulate a full disk.
from os import close, write
from os import open as open_fd
from pathlib import Path
from typing import Any

from pytest_nsa.wire import masking

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def replacing(path: Path, *, follow: bool = False) -> Iterator[int]:
    """Yield the descriptor of a new file that replaces ``path`` at the end: a reader sees the old file or the new one.

    Raises OSError. As a folder may be of unknown origin, the new file's name cannot be guessed and no link is followed; a link that
    is the folder of ``path`` itself only with ``follow``, for a path that the user has named.
    """
    folder = open_fd(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    try:
        partial = f".{path.name}.{os.urandom(8).hex()}.partial"
        fd = open_fd(partial, _FLAGS | os.O_EXCL, 0o666, dir_fd=folder)
        try:
            try:
                yield fd
            finally:
                close(fd)
            os.rename(partial, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(partial, dir_fd=folder)
            raise
    finally:
        close(folder)


def write_atomically(path: Path, content: str | bytes, *, follow: bool = False) -> None:
    """Replace a file as `replacing` does."""
    data = memoryview(content.encode(errors="backslashreplace") if isinstance(content, str) else content)
    with replacing(path, follow=follow) as fd:
        while data:
            data = data[write(fd, data) :]


def write_json(path: Path, value: Any, *, indent: int | None = None) -> None:
    """Replace a file by a value as JSON, masked if the session masks."""
    write_atomically(path, to_json(masking.value(value), indent=indent) + "\n")


def open_to_append(path: Path) -> int:
    """Return a descriptor that appends to a file, which is made if it does not exist. Raises OSError, also for a link."""
    fd = open_fd(path, _FLAGS | os.O_APPEND | os.O_NONBLOCK, 0o666)
    os.set_blocking(fd, True)  # opening a pipe without a reader has failed instead of waiting
    return fd


def append(path: Path, data: bytes) -> None:
    """Append in one write. Raises OSError, also for a link; never waits for a pipe."""
    fd = open_fd(path, _FLAGS | os.O_APPEND | os.O_NONBLOCK, 0o666)
    try:
        write(fd, data)
    finally:
        close(fd)


def touch(path: Path) -> None:
    """Make an empty file, unless there is one. Raises OSError."""
    close(open_fd(path, _FLAGS | os.O_NONBLOCK, 0o666))


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Return ``value`` as JSON; NaN and infinities, which are not JSON, as the texts 'nan', 'inf' and '-inf' (`with_numbers`)."""
    try:
        return dumps(value, indent=indent, allow_nan=False)
    except ValueError:  # a NaN or an infinity
        return dumps(_with_texts(value), indent=indent, allow_nan=False)


def _with_texts(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _with_texts(one) for key, one in value.items()}
    return [_with_texts(one) for one in value] if isinstance(value, list | tuple) else value


def with_numbers(value: Any) -> Any:
    """Return a parsed value, with the texts that `to_json`, or `nsa.trace`, wrote for NaN and infinities as numbers again."""
    if isinstance(value, str):
        return float(value) if value in ("nan", "inf", "-inf") else value
    if isinstance(value, dict):
        return {key: with_numbers(one) for key, one in value.items()}
    return [with_numbers(one) for one in value] if isinstance(value, list) else value


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append a JSON line, masked if the session masks, in one write: a killed writer loses at most its current line."""
    append(path, (to_json(masking.value(record)) + "\n").encode())


LARGEST = 64 << 20  # bytes that are read of a file


def open_to_read(path: Path, *, follow: bool = False) -> tuple[int, int]:
    """Return a descriptor of a file, and the file's size in bytes.

    Raises OSError, also for anything but a regular file and, unless ``follow``, for a link: a folder of evidence may come from a
    stranger, and a pipe or a device in it would be read for ever.
    """
    fd = open_fd(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return fd, status.st_size


def read_bytes(path: Path, most: int = LARGEST, *, follow: bool = False) -> bytes:
    """Return a file's bytes, the first ``most``. Raises OSError as `open_to_read` does."""
    fd, size = open_to_read(path, follow=follow)
    try:
        # Not one read of `most` bytes, for which memory is mapped and each page is copied once more.
        data = os.read(fd, min(most, size + 1))
        if len(data) <= size:
            return data
        parts = [data]  # it grows, or it is a file of /proc, which has no size
        while (left := most - sum(map(len, parts))) > 0 and (data := os.read(fd, min(left, 1 << 16))):
            parts.append(data)
        return b"".join(parts)
    finally:
        close(fd)


def read_text(path: Path, most: int = LARGEST) -> str:
    """Return `read_bytes` as text; '' if that fails."""
    try:
        return read_bytes(path, most).decode(errors="replace")
    except (OSError, ValueError):  # a name with a NUL byte raises ValueError
        return ""


def read_end(path: Path, most: int) -> str:
    """Return the last ``most`` bytes of a file as text; '' if it cannot be read."""
    try:
        fd, size = open_to_read(path)
    except (OSError, ValueError):
        return ""
    try:
        return os.pread(fd, most, max(0, size - most)).decode(errors="replace")
    except OSError:
        return ""
    finally:
        close(fd)


def parse(text: str | bytes) -> Any:
    """Return the value of a JSON text; None where it is not JSON, or nested deeper than a program writes."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} where it cannot be read, or holds something else."""
    found = parse(read_text(path))
    return found if isinstance(found, dict) else {}


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield what `append_line` wrote; an incomplete line (the writer was killed) is skipped, as is a file that cannot be read."""
    for line in read_text(path).splitlines():
        value = parse(line)
        if isinstance(value, dict):
            yield value
