"""Token batches: synthetic sequences, or text from FineWeb-Edu parquet files, sharded over ranks and prefetched.

Parquet schema of FineWeb-Edu: text, id, dump, url, file_path, language, language_score, token_count, score, int_score;
only ``text`` is read. Tokens are bytes; a zero byte stands between documents.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from nsa.config import Config, ConfigError

SEPARATOR = 0
READ_ROWS = 64


class BatchSource(Protocol):
    """Endless batches, each int64 [B, S + 1]: inputs are [:, :-1], targets [:, 1:]."""

    def __iter__(self) -> Iterator[torch.Tensor]: ...


class SyntheticSource:
    """Byte sequences that count up by a step of 1 to 7 from a random start: learnable, and the same on every run."""

    def __init__(self, config: Config, rank: int) -> None:
        self.shape = (config.train.batch_size, config.train.seq_len + 1)
        self.seed = config.train.seed
        self.rank = rank
        self.vocab = config.model.vocab_size

    def __iter__(self) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed * 1000 + self.rank)
        B, length = self.shape
        while True:
            start = torch.randint(0, self.vocab, (B, 1), generator=generator)
            stride = torch.randint(1, 8, (B, 1), generator=generator)
            yield (start + stride * torch.arange(length)) % self.vocab


class ParquetSource:
    """Documents of parquet files, in order, every ``world_size``-th one to this rank, packed without padding.

    Raises ConfigError, when made, for a file that is missing, truncated, empty or has no ``text`` column.
    """

    def __init__(self, config: Config, path: str, rank: int, world_size: int) -> None:
        self.files = parquet_files(path)
        self.rank, self.world_size = rank, world_size
        self.shape = (config.train.batch_size, config.train.seq_len + 1)
        counts = [check_parquet(file) for file in self.files]
        if sum(counts) < world_size:
            raise ConfigError(
                f"dataset {path!r}: {sum(counts)} documents for {world_size} ranks; each rank needs at least one"
            )

    def documents(self) -> Iterator[str]:
        """This rank's documents, once."""
        import pyarrow.parquet as parquet

        index = 0
        for file in self.files:
            for batch in parquet.ParquetFile(file).iter_batches(batch_size=READ_ROWS, columns=["text"]):
                for text in batch.column(0).to_pylist():
                    if index % self.world_size == self.rank and text:
                        yield text
                    index += 1

    def __iter__(self) -> Iterator[torch.Tensor]:
        B, length = self.shape
        buffer = bytearray()
        while True:
            seen = 0
            for text in self.documents():
                seen += 1
                buffer += text.encode("utf-8") + bytes([SEPARATOR])
                while len(buffer) >= B * length:
                    yield torch.frombuffer(buffer[: B * length], dtype=torch.uint8).long().reshape(B, length)
                    del buffer[: B * length]
            if not seen:
                raise ConfigError(f"rank {self.rank} has only empty documents in {', '.join(map(str, self.files))}")


def parquet_files(path: str) -> list[Path]:
    """The file, or the folder's ``*.parquet`` sorted by name. Raises ConfigError when there is none."""
    root = Path(path)
    if root.is_dir():
        files = sorted(root.rglob("*.parquet"))
        if not files:
            raise ConfigError(f"dataset {path!r}: no *.parquet in this folder")
        return files
    if not root.is_file():
        raise ConfigError(f"dataset {path!r}: no such file or folder; give synthetic, fineweb_edu or a parquet path")
    return [root]


def check_parquet(file: Path) -> int:
    """Number of rows of a readable parquet file with a ``text`` column; ConfigError in one line otherwise."""
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise ConfigError(
            f"dataset {str(file)!r}: reading parquet needs pyarrow; pip install 'pytest-nsa[data]'"
        ) from None
    if file.stat().st_size == 0:
        raise ConfigError(f"dataset {str(file)!r}: the file is empty (0 bytes); give a parquet file with rows")
    try:
        reader = parquet.ParquetFile(file)
        columns, rows = reader.schema_arrow.names, reader.metadata.num_rows
        kind = reader.schema_arrow.field("text").type if "text" in columns else None
        # The footer may be whole while pages are not: read the last group, where truncation by copying shows.
        if "text" in columns and rows:
            reader.read_row_group(reader.num_row_groups - 1, columns=["text"])
    except (pyarrow.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())[:120]
        raise ConfigError(f"dataset {str(file)!r}: not a whole parquet file ({reason}); copy it again") from None
    if "text" not in columns:
        raise ConfigError(
            f"dataset {str(file)!r}: no column 'text' (columns: {', '.join(columns)}); FineWeb-Edu's schema has one"
        )
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise ConfigError(f"dataset {str(file)!r}: column 'text' holds {kind}; it must hold strings")
    if rows == 0:
        raise ConfigError(f"dataset {str(file)!r}: 0 rows; give a parquet file with documents")
    return int(rows)


def open_source(config: Config, rank: int, world_size: int) -> BatchSource:
    """The source that ``config.data`` names. Raises ConfigError before any work starts."""
    if config.data.dataset == "synthetic":
        return SyntheticSource(config, rank)
    if config.data.dataset == "fineweb_edu":
        if not config.data.path:
            raise ConfigError(
                "dataset fineweb_edu: data.path is not set; name the folder of parquet files, or use --dataset PATH"
            )
        return ParquetSource(config, config.data.path, rank, world_size)
    return ParquetSource(config, config.data.dataset, rank, world_size)


class Prefetcher:
    """Reads ahead in a thread. ``skip`` batches are dropped first: where a resumed run left off."""

    def __init__(self, source: BatchSource, depth: int, skip: int = 0) -> None:
        self._queue: queue.Queue[Any] = queue.Queue(maxsize=max(1, depth))
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._fill, args=(source, skip), name="nsa-prefetch", daemon=True)
        self._thread.start()

    def _fill(self, source: BatchSource, skip: int) -> None:
        try:
            for index, batch in enumerate(source):
                if index >= skip and not self._put(batch):
                    return
        except OSError as error:  # pyarrow's errors on damaged pages are OSErrors too
            reason = " ".join(str(error).split())[:200]
            self._put(ConfigError(f"dataset: cannot be read any further ({reason}); copy it again"))
        except Exception as error:
            self._put(error)  # raised where the batch is taken, so that the run ends with the real reason

    def _put(self, item: Any) -> bool:
        while not self._closed.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def take(self) -> torch.Tensor:
        """The next batch, int64 [B, S + 1]."""
        item = self._queue.get()
        if isinstance(item, Exception):
            raise item
        return item

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join()
