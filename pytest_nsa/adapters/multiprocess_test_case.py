"""`-p pytest_nsa.adapters.multiprocess_test_case`: each torch `MultiProcessTestCase`, or a copy of it, runs on ranks.

A class gets `OnRanks` as its first base, and the mark with its own ``world_size``.
"""

import inspect
from typing import Any

import pytest

from pytest_nsa import OnRanks, world_size


def pytest_pycollect_makeitem(name: str, obj: Any) -> None:
    """Put a class with tests on ranks."""
    if not inspect.isclass(obj) or issubclass(obj, OnRanks) or name == "MultiProcessTestCase":
        return
    if any(base.__name__ == "MultiProcessTestCase" for base in obj.__mro__):
        number = _count_ranks(obj)
        obj.__bases__ = (OnRanks, *obj.__bases__)
        world_size(number, group=None)(obj)


def _count_ranks(case: Any) -> int:
    try:
        number = case.__new__(case).world_size  # a property of most
    except AttributeError:
        number = None
    if not isinstance(number, int):
        raise pytest.UsageError(
            f"{case.__module__}.{case.__name__}: has no world_size before setUp: mark it world_size(n)"
        )
    return number
