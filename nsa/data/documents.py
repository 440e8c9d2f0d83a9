"""Documents, in the same order for everybody: from parquet files of FineWeb-Edu's schema.

Schema: text, id, dump, url, file_path, language, language_score, token_count, score, int_score; only ``text`` is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

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


class ParquetDocuments:
    """The rows of parquet files, file by file in the order of their names.

    Raises ConfigError, when made, for a file that is missing, truncated, empty or has no ``text`` column.
    """

    def __init__(self, files: list[Path]) -> None:
        self.files = files
        for file in files:
            check_parquet(file)

    def parts(self) -> list[tuple[int, int]]:
        """Return each row group."""
        import pyarrow.parquet as parquet

        counts = [parquet.read_metadata(path).num_row_groups for path in self.files]
        return [(file, part) for file, count in enumerate(counts) for part in range(count)]

    def texts(self, file: int, part: int) -> list[bytes | None]:
        """Return the texts of a row group."""
        import pyarrow.parquet as parquet

        with parquet.ParquetFile(self.files[file]) as opened:
            return _texts(opened, part)

    def read(self, place: Place) -> Iterator[tuple[Place, list[bytes | None]]]:
        """Row group by row group; one whose pages are damaged is as many rows that cannot be read."""
        import pyarrow.parquet as parquet

        for number, path in enumerate(self.files[place.file :], place.file):
            with parquet.ParquetFile(path) as file:
                for part in range(place.part if number == place.file else 0, file.num_row_groups):
                    yield Place(place.epoch, number, part), _texts(file, part)


def _texts(file: Any, part: int) -> list[bytes | None]:
    import pyarrow as pa

    try:
        return checked(_column(file, part).to_pylist())
    except (OSError, pa.ArrowInvalid):  # pyarrow's words for pages that do not decode
        return [None] * file.metadata.row_group(part).num_rows


def _column(file: Any, part: int) -> Any:
    """Return the texts of a row group as an array of binary: a text may be no UTF-8."""
    import pyarrow as pa

    return file.read_row_group(part, columns=["text"], use_threads=False).column(0).cast(pa.large_binary())


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


def check_parquet(file: Path) -> None:
    """Raise ConfigError, in one line, unless a file is readable parquet with rows and a ``text`` column of strings."""
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise ConfigError(
            f"dataset {str(file)!r}: reading parquet needs pyarrow; pip install 'pytest-nsa[data]'"
        ) from None
    try:
        reader = parquet.ParquetFile(file)
        columns, rows = reader.schema_arrow.names, reader.metadata.num_rows
        kind = reader.schema_arrow.field("text").type if columns.count("text") == 1 else None
        is_text = kind is not None and (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind))
        # The footer may be whole while pages are not: read the last group, where truncation by copying shows.
        if is_text and rows:
            _column(reader, reader.num_row_groups - 1)
    except (pyarrow.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())[:120]
        raise ConfigError(f"dataset {str(file)!r}: not a whole parquet file ({reason}); copy it again") from None
    if kind is None:
        number = "more than one" if "text" in columns else "no"
        raise ConfigError(
            f"dataset {str(file)!r}: {number} column 'text' (columns: {', '.join(columns)}); FineWeb-Edu's schema has one"
        )
    if not is_text:
        raise ConfigError(f"dataset {str(file)!r}: column 'text' holds {kind}; it must hold strings")
    if rows == 0:
        raise ConfigError(f"dataset {str(file)!r}: 0 rows; give a parquet file with documents")
