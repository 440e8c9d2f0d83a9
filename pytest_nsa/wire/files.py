"""Files that survive a killed writer: replaced as a whole, or appended line by line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write beside and rename, so that a reader sees the old file or the new one."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_bytes(content.encode() if isinstance(content, str) else content)
    partial.replace(path)


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append a JSON line in one write: a killed writer loses at most the line in hand."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(fd, (json.dumps(record) + "\n").encode())
    finally:
        os.close(fd)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield what `append_line` wrote; a torn line (the writer was killed) is passed over, and so is a file that is not there."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value
