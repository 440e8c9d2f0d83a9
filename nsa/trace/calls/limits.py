"""Time limits of the calls that a rank waits in: a wait with a limit ends by itself, shortly after the limit."""

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

# A limit of a group, for all its collectives. Up to this value, a test is assumed to expect it; longer ones, as torch's default of
# half an hour, are there for ranks that hang.
SHORT_S = 10.0


def limit_of_call(values: Iterable[Any]) -> float:
    """Return the time limit in a call's arguments or options, in seconds; 0.0 without one."""
    for value in values:
        if isinstance(value, timedelta):
            return max(0.0, value.total_seconds())
        timeout = getattr(value, "timeout", None) if type(value).__name__.endswith("Options") else None
        if isinstance(timeout, timedelta) and timeout > timedelta(0):  # it is negative if not set
            return timeout.total_seconds()
    return 0.0


def limit_of_group(timeout: Any) -> float:
    """Return the time limit of a group or a store in seconds, if it is at most `SHORT_S`; else 0.0."""
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else 0.0
    return seconds if 0.0 < seconds <= SHORT_S else 0.0


def report_new_limits(to: Callable[[Any, float], None]) -> None:
    """Call ``to`` with a group and its limit, as `limit_of_group` returns it, whenever the program sets one.

    By a method of the group since torch 2.15, by a function in all versions.
    """
    for owner, name in ((dist.ProcessGroup, "set_timeout"), (dist.distributed_c10d, "_set_pg_timeout")):
        original = getattr(owner, name, None)
        if original is not None:
            setattr(owner, name, _reported(original, to))


def _reported(original: Callable[..., Any], to: Callable[[Any, float], None]) -> Callable[..., Any]:
    def reported(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        given = (*args, *kwargs.values())
        group = next((value for value in given if isinstance(value, dist.ProcessGroup)), dist.group.WORLD)
        to(group, limit_of_group(next((value for value in given if isinstance(value, timedelta)), None)))
        return result

    return reported
