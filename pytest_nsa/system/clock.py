"""Clocks that a test cannot freeze: tools for that replace the functions of `time`, and not `clock_gettime`."""

from time import CLOCK_MONOTONIC, CLOCK_REALTIME, clock_gettime


def monotonic() -> float:
    """Return seconds since an unspecified moment, by a clock that is never set back."""
    return clock_gettime(CLOCK_MONOTONIC)


def wall_clock() -> float:
    """Return seconds since the epoch."""
    return clock_gettime(CLOCK_REALTIME)
