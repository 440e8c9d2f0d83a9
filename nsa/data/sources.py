"""The sources that a configuration can name: documents, or sequences that are made as they are needed."""

import itertools
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from nsa.config import Config, ConfigError
from nsa.data.documents import Documents, FileDocuments, ShuffledDocuments, files_of
from nsa.data.packing import PackedSource, Position, Sample, Source, Tokens
from nsa.data.plain import PlainDocuments
from nsa.sections import DataConfig


class MadeSource:
    """Sequences that a function makes from the sample's own random numbers: the same on every run and any number of ranks."""

    def __init__(self, make: Callable[[np.random.Generator], Tokens], seed: int) -> None:
        self.make, self.seed = make, seed

    def samples(self, position: Position, wanted: Callable[[int], bool]) -> Iterator[Sample]:
        """See `nsa.data.packing.Source`."""
        for number in filter(wanted, itertools.count(position.samples)):
            tokens = self.make(np.random.default_rng((self.seed, number)))
            yield Sample(number, tokens, replace(position, samples=number))


def counting(length: int, vocab: int) -> Callable[[np.random.Generator], Tokens]:
    """Numbers that go up by a step of 1 to 7 from a random start: learnable in minutes."""
    return lambda random: (random.integers(vocab) + random.integers(1, 8) * np.arange(length)) % vocab


def copying(length: int, vocab: int) -> Callable[[np.random.Generator], Tokens]:
    """Random tokens, and then the same again: the second half can be predicted only by seeing half the sequence back."""

    def make(random: np.random.Generator) -> Tokens:
        half = random.integers(vocab, size=-(-length // 2))
        return np.concatenate([half, half])[:length]

    return make


# Datasets that follow from ``train.seed`` and the sample's number.
MADE = {"synthetic": counting, "copy": copying}


def open_source(config: Config) -> Source:
    """Return the source that ``config.data`` names. Raises ConfigError before any work starts."""
    data, length = config.data, config.train.seq_len + 1
    if data.dataset in MADE:
        return MadeSource(MADE[data.dataset](length, config.model.vocab_size), config.train.seed)
    path = _path_of(data)
    if path is None:
        raise ConfigError(
            "dataset fineweb_edu: data.path is not set; name the folder of parquet files, or use --dataset PATH"
        )
    return _packed(config, path, shuffled=data.shuffle)


def open_validation(config: Config) -> Source | None:
    """Return the source of ``data.validation``, None without one. Raises ConfigError."""
    path = config.data.validation
    return None if path is None else _packed(config, path, shuffled=False)


def _packed(config: Config, path: str, *, shuffled: bool) -> Source:
    files, is_parquet = files_of(path)
    documents = _parquet(files) if is_parquet else PlainDocuments(files)
    ordered: Documents = ShuffledDocuments(documents, config.train.seed) if shuffled else documents
    return PackedSource(ordered, config.train.seq_len, config.data.max_bad_rows)


def _parquet(files: list[Path]) -> FileDocuments:
    try:
        from nsa.data.parquet import ParquetDocuments
    except ImportError:
        raise ConfigError(
            f"dataset {str(files[0])!r}: reading parquet needs pyarrow; pip install 'pytest-nsa[data]'"
        ) from None
    return ParquetDocuments(files)


def _path_of(data: DataConfig) -> str | None:
    return data.path if data.dataset == "fineweb_edu" else data.dataset


def identity(config: Config) -> dict[str, Any]:
    """Return what the samples, and so a position among them, depend on, as JSON has it; files by content, wherever they are."""
    data = config.data
    found: dict[str, Any] = {"seq_len": config.train.seq_len}
    path = _path_of(data)
    if data.dataset in MADE:
        return {**found, "dataset": data.dataset, "seed": config.train.seed}
    assert path is not None  # `open_source` has refused it
    files = files_of(path)[0]
    root = Path(path) if Path(path).is_dir() else Path(path).parent
    order = {"shuffle": config.train.seed} if data.shuffle else {}
    return {**found, **order, "files": {str(file.relative_to(root)): _content(file) for file in files}}


def _content(file: Path) -> list[int]:
    """Return a file's bytes, and the CRC-32 of its first MiB."""
    with file.open("rb") as opened:
        return [file.stat().st_size, zlib.crc32(opened.read(1 << 20))]
