"""A plugin for DeepSpeed's own tests (``-p deepspeed_on_ranks``): a DistributedTest runs on ranks. Nothing of DeepSpeed changes.

Its conftest.py starts processes for a class with `is_dist_test`; here that is false, and the class has our mark. A list in
`world_size` makes a test for each number.
"""

from __future__ import annotations

import inspect
import os

import pytest

from pytest_nsa import world_size


def pytest_pycollect_makeitem(name: str, obj: object) -> None:
    if inspect.isclass(obj) and name.startswith("Test") and getattr(obj, "is_dist_test", False):
        sizes = obj.world_size if isinstance(obj.world_size, list) else [obj.world_size]
        world_size(*sizes, group=None)(obj)
        obj.is_dist_test, obj.is_on_ranks = False, True


@pytest.fixture(autouse=True)
def deepspeed_s_group(request: pytest.FixtureRequest) -> None:
    """What its processes do before a test."""
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
