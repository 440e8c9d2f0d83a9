"""A plugin that keeps the tests that run on ranks, of a suite that has others, and writes their ids to the file ON_RANKS.

It keeps all tests of a suite that has no mark: what its tests start runs on ranks.
"""

import os
from pathlib import Path

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("world_size") is not None]
    items[:] = marked or items
    Path(os.environ["ON_RANKS"]).write_text("\n".join(item.nodeid for item in items), encoding="utf-8")
