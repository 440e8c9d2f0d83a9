"""A plugin for ignite's own tests (``-p ignite_on_ranks``): what needs two processes runs on two ranks. Nothing of ignite changes.

Its conftest takes a process's rank from the number of the xdist worker, as ignite's CI starts two workers that run every test.
"""

import os

import pytest

from pytest_nsa import world_size

FIXTURES = {"distributed", "distributed_context_single_node_gloo"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if FIXTURES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(world_size(2, group=None))


@pytest.fixture(scope="session")
def worker_id() -> str:
    return f"gw{os.environ.get('LOCAL_RANK', 0)}"
