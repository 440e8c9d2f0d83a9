"""Documents from parquet files of FineWeb-Edu's schema.

Schema: text, id, dump, url, file_path, language, language_score, token_count, score, int_score; only ``text`` is read.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as parquet

from nsa.config import ConfigError
from nsa.data.documents import Place, checked


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
        counts = [parquet.read_metadata(path).num_row_groups for path in self.files]
        return [(file, part) for file, count in enumerate(counts) for part in range(count)]

    def texts(self, file: int, part: int) -> list[bytes | None]:
        """Return the texts of a row group."""
        with parquet.ParquetFile(self.files[file]) as opened:
            return _texts(opened, part)

    def read(self, place: Place) -> Iterator[tuple[Place, list[bytes | None]]]:
        """Row group by row group; one whose pages are damaged is as many rows that cannot be read."""
        for number, path in enumerate(self.files[place.file :], place.file):
            with parquet.ParquetFile(path) as file:
                for part in range(place.part if number == place.file else 0, file.num_row_groups):
                    yield Place(place.epoch, number, part), _texts(file, part)


def _texts(file: Any, part: int) -> list[bytes | None]:
    try:
        return checked(_column(file, part).to_pylist())
    except (OSError, pyarrow.ArrowInvalid):  # pyarrow's words for pages that do not decode
        return [None] * file.metadata.row_group(part).num_rows


def _column(file: Any, part: int) -> Any:
    """Return the texts of a row group as an array of binary: a text may be no UTF-8."""
    return file.read_row_group(part, columns=["text"], use_threads=False).column(0).cast(pyarrow.large_binary())


def check_parquet(file: Path) -> None:
    """Raise ConfigError, in one line, unless a file is readable parquet with rows and a ``text`` column of strings."""
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
