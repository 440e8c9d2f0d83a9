"""Documents from text files and from JSON lines: a file of text is one document, a line of JSON one with its ``text``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from nsa.config import ConfigError
from nsa.data.documents import ROWS, Place, checked

SUFFIXES = (".txt", ".jsonl")
LARGEST = 1 << 30  # bytes of one document


class PlainDocuments:
    """The documents of ``*.txt`` and ``*.jsonl`` files, file by file in the order of their names.

    Raises ConfigError, when made, for a file that is empty, a text of more than `LARGEST` bytes, or JSON lines without ``text``.
    """

    def __init__(self, files: list[Path]) -> None:
        self.files = files
        for file in files:
            _check(file)

    def read(self, place: Place) -> Iterator[tuple[Place, list[bytes | None]]]:
        """Some lines of JSON at a time; their part is the offset in bytes of the first."""
        for number, path in enumerate(self.files[place.file :], place.file):
            start = place.part if number == place.file else 0
            if path.suffix == ".txt":
                yield Place(place.epoch, number, 0), checked([path.read_bytes()])
                continue
            with path.open("rb") as file:
                file.seek(start)
                while lines := list(islice(iter(file.readline, b""), ROWS)):
                    yield Place(place.epoch, number, start), [_text_of(line) for line in lines if line.strip()]
                    start += sum(map(len, lines))


def plain_files(path: str) -> list[Path]:
    """Return the file of text or JSON lines at ``path``, or those in this folder; [] where there is parquet, or neither."""
    root = Path(path)
    if root.is_dir():
        has_parquet = next(root.rglob("*.parquet"), None) is not None
        return [] if has_parquet else sorted(p for p in root.rglob("*") if p.suffix in SUFFIXES and p.is_file())
    return [root] if root.suffix in SUFFIXES and root.is_file() else []


def _text_of(line: bytes) -> bytes | None:
    """Return a line's ``text`` in UTF-8; None for one that cannot be read."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):  # no JSON, or no UTF-8
        return None
    text = entry.get("text") if isinstance(entry, dict) else None
    return checked([text.encode("utf-8", "surrogatepass")])[0] if isinstance(text, str) else None


def _check(file: Path) -> None:
    size = file.stat().st_size
    if size == 0:
        raise ConfigError(f"dataset {str(file)!r}: the file is empty (0 bytes); give one with text")
    if file.suffix == ".txt":
        if size > LARGEST:
            raise ConfigError(
                f"dataset {str(file)!r}: a text file is one document, and this one has more than {LARGEST >> 30} GiB; "
                "write its documents as lines of JSON (.jsonl), each with 'text'"
            )
        return
    with file.open("rb") as lines:
        first = lines.readline(LARGEST)
    if _text_of(first) is None:
        raise ConfigError(
            f'dataset {str(file)!r}: line 1 is no JSON object with \'text\', as in {{"text": "..."}}: {first[:60]!r}'
        )
