"""Texts to tokens: bytes as they are, or a tokenizer of the ``tokenizers`` library. A separator ends each document."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from nsa.config import ConfigError

Tokens = npt.NDArray[Any]
# What widely used tokenizers call the end of a text.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


class Tokenizer(Protocol):
    """``vocab_size`` is one more than the largest token."""

    vocab_size: int

    def encode(self, texts: Sequence[bytes]) -> list[Tokens]:
        """Return the tokens of each text (UTF-8), its separator last."""


class ByteTokenizer:
    """Each byte is a token, uint8; a zero byte ends a document."""

    vocab_size = 256

    def encode(self, texts: Sequence[bytes]) -> list[Tokens]:
        """See `Tokenizer`."""
        return [np.frombuffer(text + b"\0", dtype=np.uint8) for text in texts]


class FileTokenizer:
    """A ``tokenizer.json`` as the ``tokenizers`` library writes it. ConfigError for a file that is not one."""

    def __init__(self, path: str) -> None:
        try:
            from tokenizers import Tokenizer as Loaded
        except ImportError:
            raise ConfigError(
                f"data.tokenizer={path!r}: needs tokenizers; pip install 'pytest-nsa[tokenizers]'"
            ) from None
        if not Path(path).is_file():
            raise ConfigError(f"data.tokenizer={path!r}: no such file; give byte, or the path of a tokenizer.json")
        try:
            self._tokenizer = Loaded.from_file(path)
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(
                f"data.tokenizer={path!r}: not a tokenizer ({' '.join(str(error).split())[:120]})"
            ) from None
        # As the file may have been saved for batches of a model's length: documents are whole here.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size: int = 1 + max(self._tokenizer.get_vocab().values(), default=-1)
        ends = [found for name in _ENDS if (found := self._tokenizer.token_to_id(name)) is not None]
        if not ends:
            raise ConfigError(f"data.tokenizer={path!r}: has no token that ends a text ({', '.join(_ENDS)})")
        self._end: int = ends[0]

    def encode(self, texts: Sequence[bytes]) -> list[Tokens]:
        """See `Tokenizer`."""
        encoded = self._tokenizer.encode_batch([text.decode() for text in texts], add_special_tokens=False)
        return [np.asarray([*entry.ids, self._end], dtype=np.int32) for entry in encoded]


def open_tokenizer(name: str) -> Tokenizer:
    """Return ``byte``, or the path of a tokenizer.json."""
    return ByteTokenizer() if name == "byte" else FileTokenizer(name)
