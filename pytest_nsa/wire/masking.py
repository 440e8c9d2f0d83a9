"""The filter for secrets in what this process writes. A session sets it at its beginning; all functions that write call it."""

from typing import Any, Protocol


class Filter(Protocol):
    """The functions of ``nsa.trace.secrets``, which a session imports only if it masks."""

    def masked(self, text: str) -> str:
        """Mask a text."""

    def masked_source(self, text: str) -> str:
        """Mask a Python function; it keeps its number of lines, and can be parsed."""

    def masked_value(self, value: Any) -> Any:
        """Mask the texts of a JSON value."""


_filter: Filter | None = None


def mask_with(chosen: Filter | None) -> None:
    """Set the filter; None: leave everything unchanged."""
    global _filter
    _filter = chosen


def is_on() -> bool:
    """Return whether the session masks."""
    return _filter is not None


def text(value: str) -> str:
    """Return a text, masked if the session masks."""
    return value if _filter is None else _filter.masked(value)


def source(value: str) -> str:
    """Return a Python function, masked if the session masks."""
    return value if _filter is None else _filter.masked_source(value)


def value(value: Any) -> Any:
    """Return a JSON value, with its texts masked if the session masks."""
    return value if _filter is None else _filter.masked_value(value)
