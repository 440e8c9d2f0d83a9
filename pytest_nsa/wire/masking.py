"""The filter for secrets in what this process writes. It is set when a session begins, and called where texts are written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Mask = Callable[[str], str]

_text: Mask | None = None
_source: Mask | None = None


def mask_with(of_text: Mask | None, of_source: Mask | None) -> None:
    """From now on, mask texts, and functions of Python, by these; None: leave them as they are."""
    global _text, _source
    _text, _source = of_text, of_source


def is_on() -> bool:
    """Return whether the session masks."""
    return _text is not None


def text(value: str) -> str:
    """Return a text as it may be written."""
    return value if _text is None else _text(value)


def source(value: str) -> str:
    """Return a function of Python as it may be written: it has as many lines, and can be parsed."""
    return value if _source is None else _source(value)


def value(value: Any) -> Any:
    """Return a value of JSON with its texts as they may be written."""
    return value if _text is None else masked_value(value, _text)


def masked_value(value: Any, mask: Mask) -> Any:
    """Return a value of JSON with its texts masked, names in objects too: pytest's reports have tests' ids there."""
    if isinstance(value, str):
        return mask(value)
    if isinstance(value, list | tuple):
        return [masked_value(v, mask) for v in value]
    if isinstance(value, dict):
        return {mask(k) if isinstance(k, str) else k: masked_value(v, mask) for k, v in value.items()}
    return value
