"""Documents, in the same order for everybody: what a source of texts can do, and which files a dataset's path names."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from nsa.config import ConfigError


@dataclass(frozen=True, slots=True)
class Place:
    """Somewhere in the documents where reading can begin: the ``epoch``-th pass over them, a file, and a part of it.

    A part is a row group of a parquet file, or an offset in bytes in a file of JSON lines.
    """

    epoch: int = 0
    file: int = 0
    part: int = 0


class Documents(Protocol):
    """What a source of texts can do."""

    def read(self, place: Place) -> Iterator[tuple[Place, list[bytes | None]]]:
        """Once from ``place`` to the end: the texts of each part in UTF-8, None for a row that cannot be read."""


class FileDocuments(Documents, Protocol):
    """Documents of files, which can be had part by part in any order."""

    files: list[Path]

    def parts(self) -> list[tuple[int, int]]:
        """Return each part as (file, part), in their order."""

    def texts(self, file: int, part: int) -> list[bytes | None]:
        """Return the texts of a part."""


class ShuffledDocuments:
    """The documents of files in an order that follows from seed and epoch: the parts are shuffled, and the documents of each."""

    def __init__(self, documents: FileDocuments, seed: int) -> None:
        self.documents, self.seed, self._parts = documents, seed, documents.parts()

    def read(self, place: Place) -> Iterator[tuple[Place, list[bytes | None]]]:
        """As `Documents.read`; the part of a place is its number in this order."""
        order = np.random.default_rng((self.seed, place.epoch)).permutation(len(self._parts))
        for number in range(place.part, len(order)):
            texts = self.documents.texts(*self._parts[order[number]])
            within = np.random.default_rng((self.seed, place.epoch, number)).permutation(len(texts))
            yield Place(place.epoch, 0, number), [texts[i] for i in within]


def checked(texts: list[bytes | None]) -> list[bytes | None]:
    """None in place of what is not UTF-8."""
    return [text if text is None or text.isascii() or _is_utf8(text) else None for text in texts]


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def files_of(path: str) -> tuple[list[Path], bool]:
    """Return the files that a dataset's path names, sorted, and whether they are parquet; else each is JSON lines or text.

    In a folder parquet comes before other files, and hidden and binary ones are passed over. ConfigError for an unknown name.
    """
    root = Path(path)
    if root.is_dir():
        found = sorted(
            p for p in root.rglob("*") if p.is_file() and not any(n.startswith(".") for n in p.relative_to(root).parts)
        )
        parquet = [p for p in found if p.suffix == ".parquet"]
        files = parquet or [p for p in found if b"\0" not in _head(p)]
        if not files:
            raise ConfigError(f"dataset {path!r}: no parquet, JSON lines or text in this folder")
        return files, bool(parquet)
    if not root.is_file():
        raise ConfigError(
            f"dataset {path!r}: no such file or folder; give synthetic, fineweb_edu or a path of parquet or text"
        )
    return [root], root.suffix == ".parquet" or _head(root).startswith(b"PAR1")


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(1 << 13)
