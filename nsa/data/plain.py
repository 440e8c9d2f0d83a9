"""Documents from text files of any suffix, each a document, and from JSON lines, each line a document with its ``text``."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from nsa.config import ConfigError
from nsa.data.documents import Place, checked

ROWS = 256  # lines that are decoded at a time
SHUFFLED = 8  # lines that stay together where documents are shuffled


class PlainDocuments:
    """The documents of text files and of JSON lines (``*.jsonl``), file by file.

    Raises ConfigError, when made, for a file that is empty or is no text, and for JSON lines without ``text``.
    """

    def __init__(self, files: list[Path]) -> None:
        self.files = files
        for file in files:
            _check(file)

    def parts(self) -> list[tuple[int, int]]:
        """Return each text file, and of JSON lines some at a time; they are read once to find where these begin."""
        found = []
        for number, path in enumerate(self.files):
            found.append((number, 0))
            if _has_lines(path):
                with path.open("rb") as file:
                    while list(islice(iter(file.readline, b""), SHUFFLED)):
                        found.append((number, file.tell()))
                found.pop()
        return found

    def texts(self, file: int, part: int) -> list[bytes | None]:
        """Return a text file's text, or those of `SHUFFLED` lines from an offset on."""
        path = self.files[file]
        if not _has_lines(path):
            return checked([path.read_bytes()])
        with path.open("rb") as opened:
            opened.seek(part)
            return [_text_of(line) for line in islice(opened, SHUFFLED) if line.strip()]

    def read(self, place: Place) -> Iterator[tuple[Place, list[bytes | None]]]:
        """Some lines of JSON at a time; their part is the offset in bytes of the first."""
        for number, path in enumerate(self.files[place.file :], place.file):
            start = place.part if number == place.file else 0
            if not _has_lines(path):
                yield Place(place.epoch, number, 0), self.texts(number, 0)
                continue
            with path.open("rb") as file:
                file.seek(start)
                while lines := list(islice(iter(file.readline, b""), ROWS)):
                    yield Place(place.epoch, number, start), [_text_of(line) for line in lines if line.strip()]
                    start += sum(map(len, lines))


def _has_lines(path: Path) -> bool:
    return path.suffix == ".jsonl"


def _text_of(line: bytes) -> bytes | None:
    """Return a line's ``text`` in UTF-8; None for one that cannot be read."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):  # no JSON, or no UTF-8
        return None
    text = entry.get("text") if isinstance(entry, dict) else None
    return checked([text.encode("utf-8", "surrogatepass")])[0] if isinstance(text, str) else None


def _check(file: Path) -> None:
    if file.stat().st_size == 0:
        raise ConfigError(f"dataset {str(file)!r}: the file is empty (0 bytes); give one with text")
    if not _has_lines(file):
        with file.open("rb") as text:
            if b"\0" in text.read(1 << 13):
                raise ConfigError(
                    f"dataset {str(file)!r}: is not text; give parquet, JSON lines (.jsonl) or text in UTF-8"
                )
        return
    with file.open("rb") as lines:
        first = lines.readline()
    if _text_of(first) is None:
        raise ConfigError(
            f'dataset {str(file)!r}: line 1 is no JSON object with \'text\', as in {{"text": "..."}}: {first[:60]!r}'
        )
