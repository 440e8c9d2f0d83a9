"""A plugin for mmengine's own tests (``-p mmengine_on_ranks``): its MultiProcessTestCase runs on ranks.

Nothing of mmengine changes: each class gets OnRanks as its first base, and the mark.
"""

from __future__ import annotations

import inspect

from mmengine.testing._internal import MultiProcessTestCase

from pytest_nsa import OnRanks, world_size


def pytest_pycollect_makeitem(obj: object) -> None:
    if not inspect.isclass(obj) or obj is MultiProcessTestCase:  # test modules import the base
        return
    if issubclass(obj, MultiProcessTestCase) and not issubclass(obj, OnRanks):
        obj.__bases__ = (OnRanks, *obj.__bases__)
        world_size(2, group=None)(obj)
