"""A stream of tokens cut into samples that are numbered for ever, so that which rank trains on what follows from arithmetic.

Each byte is a token. Documents follow each other, a zero byte behind each; sample i is the tokens i * S to i * S + S (S inputs and
as many targets: each token is predicted once). With N ranks and batches of B, rank r takes in its m-th micro-batch the samples
``first + (m * N + r) * B`` and the B - 1 behind it. So a run that goes on, with as many ranks or with others, goes on at
``first`` = the samples that all ranks have taken together: none is lost, and none taken twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from nsa.config import ConfigError
from nsa.data.documents import Documents, Place

if TYPE_CHECKING:
    import torch

Tokens = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Position:
    """How far a run has come: ``samples`` taken by all ranks together. Reading may begin at ``place``, before which there
    are ``tokens`` tokens; ``bad_rows`` of the documents up to there could not be read.
    """

    samples: int = 0
    place: Place = field(default_factory=Place)
    tokens: int = 0
    bad_rows: int = 0

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Position:
        """Build it from its fields, as `asdict` returns them."""
        return cls(**{**fields, "place": Place(**fields["place"])})


@dataclass(frozen=True, slots=True)
class Sample:
    """``tokens`` int [S + 1]."""

    number: int
    tokens: Tokens
    position: Position


class Source(Protocol):
    """Endless samples."""

    def samples(self, position: Position, wanted: Callable[[int], bool]) -> Iterator[Sample]:
        """From sample ``position.samples`` on, those that are ``wanted``."""


@dataclass(frozen=True, slots=True)
class Batch:
    """``tokens`` int64 [B, S + 1]: inputs are [:, :-1], targets [:, 1:]. ``position`` of the run when all ranks have theirs."""

    tokens: torch.Tensor
    position: Position


class PackedSource:
    """Samples of ``seq_len`` + 1 tokens from documents, again and again. ConfigError beyond ``max_bad_rows`` unreadable rows."""

    def __init__(self, documents: Documents, seq_len: int, max_bad_rows: int) -> None:
        self.documents, self.seq_len, self.max_bad_rows = documents, seq_len, max_bad_rows

    def samples(self, position: Position, wanted: Callable[[int], bool]) -> Iterator[Sample]:
        """See `Source`. Documents that no wanted sample reaches into are passed over without a copy."""
        S, number = self.seq_len, position.samples
        held: deque[tuple[int, Tokens, Position]] = deque()  # (number of its first token, tokens, where it was read)
        for at, tokens, place in self._documents(position):
            held.append((at, tokens, place))
            end = at + len(tokens)
            while number * S + S + 1 <= end:
                low = number * S
                while held[0][0] + len(held[0][1]) <= low:
                    held.popleft()
                if wanted(number):
                    yield self._sample(number, low, held)
                number += 1

    def _sample(self, number: int, low: int, held: deque[tuple[int, Tokens, Position]]) -> Sample:
        high = low + self.seq_len + 1
        parts = [tokens[max(0, low - at) : high - at] for at, tokens, _ in held if at < high]
        return Sample(number, np.concatenate(parts), replace(held[0][2], samples=number))

    def _documents(self, position: Position) -> Iterator[tuple[int, Tokens, Position]]:
        """Yield each document's tokens from ``position.place`` on, with the number of the first, pass after pass."""
        at, bad, place = position.tokens, position.bad_rows, position.place
        while True:
            before = at
            if not (place.file or place.part):
                bad = 0  # of this pass over the documents
            for here, texts in self._read(place):
                start = Position(0, here, at, bad)
                bad += sum(text is None for text in texts)
                if bad > self.max_bad_rows:
                    raise ConfigError(
                        f"dataset: {bad} rows cannot be read, the last in part {here.part} of file {here.file}; "
                        f"data.max_bad_rows={self.max_bad_rows} allows no more: copy the data again, or raise it"
                    )
                for text in filter(None, texts):
                    tokens = np.frombuffer(text + b"\0", dtype=np.uint8)
                    yield at, tokens, start
                    at += len(tokens)
            if at == before and place.file == place.part == 0:
                unread = f"{bad} rows cannot be read (no text in UTF-8), and the others are empty" if bad else ""
                raise ConfigError(f"dataset: {unread or 'all its documents are empty'}; give one with text in UTF-8")
            place = Place(place.epoch + 1)

    def _read(self, place: Place) -> Iterator[tuple[Place, list[bytes | None]]]:
        """Yield what the documents yield. ConfigError where a file cannot be read any more."""
        try:
            yield from self.documents.read(place)
        except OSError as error:
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(f"dataset: a file cannot be read any more ({reason}); put it back") from None


def batches(
    source: Source, position: Position, size: int, rank: int, world_size: int, part: int = 0, parts: int = 1
) -> Iterator[Batch]:
    """Yield this rank's micro-batches of ``size`` samples; of those the ``part``-th of every ``parts``, for one of several
    readers.
    """
    first, everybody = position.samples, size * world_size

    def is_ours(number: int) -> bool:
        micro, within = divmod(number - first, everybody)
        return within // size == rank and micro % parts == part

    gathered: list[Sample] = []
    for sample in source.samples(position, is_ours):
        gathered.append(sample)
        if len(gathered) == size:
            taken = (gathered[0].number - first) // everybody + 1
            yield _batch(gathered, first + taken * everybody)
            gathered = []


def _batch(samples: list[Sample], taken: int) -> Batch:
    import torch  # not before the first batch: a source that cannot be used is refused sooner

    return Batch(
        tokens=torch.from_numpy(np.stack([sample.tokens for sample in samples]).astype(np.int64)),
        position=replace(samples[0].position, samples=taken),
    )
