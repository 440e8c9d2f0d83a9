"""The filter for secrets in what this process writes. A session sets it at its beginning; all functions that write call it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Mask = Callable[[str], str]

_text: Mask | None = None
_source: Mask | None = None


def mask_with(of_text: Mask | None, of_source: Mask | None) -> None:
    """Set the filters for texts and for Python functions; None: leave them unchanged."""
    global _text, _source
    _text, _source = of_text, of_source


def is_on() -> bool:
    """Return whether the session masks."""
    return _text is not None


def text(value: str) -> str:
    """Return a text, masked if the session masks."""
    return value if _text is None else _text(value)


def source(value: str) -> str:
    """Return a Python function, masked if the session masks; it keeps its number of lines, and can be parsed."""
    return value if _source is None else _source(value)


def value(value: Any) -> Any:
    """Return a JSON value, with its texts masked if the session masks."""
    return value if _text is None else masked_value(value, _text)


def masked_value(value: Any, mask: Mask) -> Any:
    """Return a JSON value with its texts masked, also the names in objects: pytest's reports have tests' ids there."""
    if isinstance(value, str):
        return mask(value)
    if isinstance(value, list | tuple):
        return [masked_value(v, mask) for v in value]
    if isinstance(value, dict):
        return {mask(k) if isinstance(k, str) else k: masked_value(v, mask) for k, v in value.items()}
    return value
