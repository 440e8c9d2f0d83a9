"""Values from YAML, variables and options as the types of a dataclass's fields, or one line on what is wrong."""

from __future__ import annotations

import dataclasses
import difflib
import reprlib
import sys
import types
import typing
from typing import Any, Literal


class ConfigError(ValueError):
    """A setting that cannot be used. The message is one line: what, its value, and the right form.

    Characters that a terminal would obey are replaced: a message may quote a damaged file.
    """

    def __init__(self, message: str) -> None:
        super().__init__("".join(c if c.isprintable() else "?" for c in message))


def parse_layer_range(text: str, n_layers: int | None = None) -> tuple[int, int]:
    """Parse ``'start:end'`` (half open, in layers). Raises ConfigError with the right form."""
    start_text, colon, end_text = text.partition(":")
    if not colon or not start_text.strip().isdecimal() or not end_text.strip().isdecimal():
        raise ConfigError(f"{text!r}: must be start:end in whole layers, as in '0:6' (layers 0 to 5)")
    start, end = int(start_text), int(end_text)
    if start >= end:
        raise ConfigError(f"{text!r}: the range must go up, as in '0:6' (layers 0 to 5)")
    if n_layers is not None and end > n_layers:
        raise ConfigError(f"{text!r}: the model has {n_layers} layers; the largest range is '0:{n_layers}'")
    return start, end


def field_names(cls: type) -> list[str]:
    return [f.name for f in dataclasses.fields(cls)]


def did_you_mean(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"


class _Limited(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        """Return a number's digits, or how many bits it has where Python would write no text of it."""
        return super().repr_int(x, level) if x.bit_length() < 1 << 13 else f"a number of {x.bit_length()} bits"


_LIMITS = _Limited()
_LIMITS.maxstring = _LIMITS.maxother = MOST_SHOWN = 80


def shown(value: Any) -> str:
    """Return ``repr(value)`` for a message, 80 characters at most: what a file holds may be of any size."""
    text = _LIMITS.repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}..."


MOST_WHOLE = 2**63  # which torch's whole numbers are below

_ON, _OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def switch(text: str, where: str) -> bool:
    """Return what a variable's text switches, in any case; ConfigError for another text."""
    if text.lower() in (*_ON, *_OFF):
        return text.lower() in _ON
    raise ConfigError(f"{where}: must be 0 or 1 (or true, yes, on; false, no, off)")


def convert(cls: type, key: str, value: Any, where: str, *, from_text: bool = False) -> Any:
    """Value as the field's type, or ConfigError. ``from_text``: environment variables are strings."""
    kind = typing.get_type_hints(cls)[key]
    optional = typing.get_origin(kind) in (types.UnionType, typing.Union) and type(None) in typing.get_args(kind)
    if optional:
        if value is None:
            return None
        kind = next(k for k in typing.get_args(kind) if k is not type(None))
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        if value not in choices:
            raise ConfigError(f"{where}: must be one of {', '.join(map(str, choices))}, got {shown(value)}")
        return value
    if typing.get_origin(kind) is tuple:
        return _convert_range(value, where)
    if kind is bool:
        if from_text:
            return switch(value, where)
        if isinstance(value, bool):
            return value
        raise ConfigError(f"{where}: must be true or false, got {shown(value)}")
    if kind in (int, float):
        return _convert_number(kind, value, where, from_text)
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{where}: must be text, and not empty, got {shown(value)}")
    return value


def _convert_range(value: Any, where: str) -> tuple[int, int]:
    if isinstance(value, str):
        try:
            return parse_layer_range(value)
        except ConfigError as error:
            message = str(error).partition(": ")[2]
            raise ConfigError(f"{where}: {message}" if repr(value) in where else f"{where}: {error}") from None
    if isinstance(value, list | tuple) and len(value) == 2 and all(type(v) is int for v in value):
        return parse_layer_range(f"{value[0]}:{value[1]}")
    raise ConfigError(f"{where}: must be start:end in whole layers, as in '0:6', got {shown(value)}")


def _convert_number(kind: type, value: Any, where: str, from_text: bool) -> int | float:
    # YAML 1.1 reads 1e-4 as text, so text that is a number is one for a float field.
    if isinstance(value, str) and (from_text or kind is float):
        try:
            value = kind(value)
        except ValueError:
            raise ConfigError(f"{where}: must be a number, got {shown(value)}") from None
    if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
        raise ConfigError(f"{where}: must be {'a whole number' if kind is int else 'a number'}, got {shown(value)}")
    if not abs(value) <= sys.float_info.max:
        raise ConfigError(f"{where}: must be a finite number, got {shown(value)}")
    if kind is int and not -MOST_WHOLE <= value < MOST_WHOLE:
        raise ConfigError(f"{where}: must be below 2**63, got {shown(value)}")
    return kind(value)
