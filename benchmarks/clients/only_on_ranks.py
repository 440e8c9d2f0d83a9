"""A plugin that keeps the tests that run on ranks, of a suite that has others (``-p only_on_ranks``).

It writes their ids to the file ``ONLY_ON_RANKS``, if set: a suite's own conftest.py may change what --collect-only prints.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if item.get_closest_marker("world_size") is not None]
    if "ONLY_ON_RANKS" in os.environ:
        Path(os.environ["ONLY_ON_RANKS"]).write_text("\n".join(item.nodeid for item in items), encoding="utf-8")
