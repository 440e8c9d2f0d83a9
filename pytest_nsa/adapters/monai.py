"""`-p pytest_nsa.adapters.monai`: a test with MONAI's decorator `DistCall` on one node runs on ranks."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest

from pytest_nsa import backend, world_size


def pytest_configure(config: pytest.Config) -> None:
    """Replace what the decorator does. Raise UsageError outside of MONAI's repository."""
    for name in ("tests.test_utils", "tests.utils"):
        try:
            call = importlib.import_module(name).DistCall
        except (ImportError, AttributeError):
            continue
        call.__call__ = _mark
        return
    raise pytest.UsageError(f"pytest_nsa.adapters.monai: no DistCall in tests/test_utils.py of {config.rootpath}")


def _mark(self: Any, test: Callable[..., Any]) -> Callable[..., Any]:
    return world_size(self.nnodes * self.nproc_per_node)(backend(self.backend)(test))
