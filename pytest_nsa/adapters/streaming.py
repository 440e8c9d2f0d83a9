"""`-p pytest_nsa.adapters.streaming`: a DistributedTest of mosaicml-streaming runs on ranks.

Its conftest.py starts processes for a class with `is_dist_test`; here that is false. Each test has the number of its mark
`world_size`, or of its class.
"""

import os
from typing import Any

import pytest

from pytest_nsa import world_size


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test of a DistributedTest."""
    for item in items:
        case: Any = getattr(item, "cls", None)
        if getattr(case, "is_dist_test", False) or getattr(case, "is_on_ranks", False):
            mark = item.get_closest_marker("world_size")
            item.add_marker(world_size(mark.args[0] if mark is not None else case.world_size), append=False)
            case.is_dist_test, case.is_on_ranks = False, True


@pytest.fixture(autouse=True)
def local_rank_of_streaming(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the local rank that its processes have, which is 0 in all of them."""
    if getattr(request.cls, "is_on_ranks", False) and "RANK" in os.environ:
        monkeypatch.setenv("LOCAL_RANK", "0")
