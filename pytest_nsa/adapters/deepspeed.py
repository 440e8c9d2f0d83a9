"""`-p pytest_nsa.adapters.deepspeed`: a DistributedTest of DeepSpeed runs on ranks.

Its conftest.py starts processes for a class with `is_dist_test`; here that is false, and the class has our mark. A list in
`world_size` makes a test for each number.
"""

import os
from typing import Any

import pytest

from pytest_nsa import world_size


def pytest_pycollect_makeitem(name: str, obj: object) -> None:
    """Mark a class that is a DistributedTest."""
    if isinstance(obj, type) and name.startswith("Test") and getattr(obj, "is_dist_test", False):
        case: Any = obj
        sizes = case.world_size if isinstance(case.world_size, list) else [case.world_size]
        world_size(*sizes, group=None)(case)
        case.is_dist_test, case.is_on_ranks = False, True


@pytest.fixture(autouse=True)
def deepspeed_s_group(request: pytest.FixtureRequest) -> None:
    """Do what its processes do before a test."""
    if not getattr(request.cls, "is_on_ranks", False):
        return
    import deepspeed

    os.environ["LOCAL_SIZE"] = os.environ["LOCAL_WORLD_SIZE"]
    if not request.cls.set_dist_env:
        for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(variable, None)
    if request.cls.init_distributed:
        deepspeed.init_distributed(dist_backend=request.cls.backend)
        deepspeed.comm.barrier()
