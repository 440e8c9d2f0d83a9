"""The sources that a configuration can name: documents, or sequences that are made as they are needed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from nsa.config import Config, ConfigError
from nsa.data.documents import Documents, HubDocuments, ParquetDocuments
from nsa.data.packing import PackedSource, Position, Sample, Source
from nsa.data.plain import PlainDocuments, plain_files
from nsa.data.tokens import Tokens, open_tokenizer


class MadeSource:
    """Sequences that a function makes from the sample's own random numbers: the same on every run and any number of ranks."""

    def __init__(self, make: Callable[[np.random.Generator], Tokens], seed: int) -> None:
        self.make, self.seed = make, seed

    def samples(self, position: Position, wanted: Callable[[int], bool]) -> Iterator[Sample]:
        """See `nsa.data.packing.Source`."""
        for number in filter(wanted, itertools.count(position.samples)):
            tokens = self.make(np.random.default_rng((self.seed, number)))
            yield Sample(number, tokens, (), replace(position, samples=number))


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
    tokenizer = open_tokenizer(data.tokenizer)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"data.tokenizer={data.tokenizer!r}: has {tokenizer.vocab_size} tokens, the model {config.model.vocab_size}; "
            "raise model.vocab_size"
        )
    path = data.path if data.dataset == "fineweb_edu" else data.dataset
    if path is None and data.hub is None:
        raise ConfigError(
            "dataset fineweb_edu: neither data.path nor data.hub is set; name the folder of parquet files, "
            "or the hub's dataset, or use --dataset PATH"
        )
    if path is None and data.hub is not None:
        documents: Documents = HubDocuments(data.hub)
    else:
        plain = plain_files(str(path))
        documents = PlainDocuments(plain) if plain else ParquetDocuments(str(path))
    return PackedSource(documents, tokenizer, config.train.seq_len, data.max_bad_rows)
