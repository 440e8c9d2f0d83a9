"""Time limits of the calls that a rank waits in: until then, and a little longer, such a wait ends by itself."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

# A group's own limit, of all its collectives. Up to this it is one that a test means to wait for; torch's usual one, of
# half an hour, and what users give in its place are there for ranks that hang.
SHORT_S = 10.0


def limit_of_call(values: Iterable[Any]) -> float:
    """Return the seconds that a call's arguments, or its options, allow it; 0.0 where they name none."""
    for value in values:
        if isinstance(value, timedelta):
            return max(0.0, value.total_seconds())
        timeout = getattr(value, "timeout", None) if type(value).__name__.endswith("Options") else None
        if isinstance(timeout, timedelta) and timeout > timedelta(0):  # unset is below
            return timeout.total_seconds()
    return 0.0


def limit_of_group(timeout: Any) -> float:
    """Return a new group's own limit in seconds, where it is short; else 0.0."""
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else 0.0
    return seconds if 0.0 < seconds <= SHORT_S else 0.0
