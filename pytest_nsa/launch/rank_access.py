"""Whether this process is a rank, without importing what only ranks need."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_nsa.launch.rank import RankContext


def current_rank() -> RankContext | None:
    """This process's context when it is a rank, else None."""
    module = sys.modules.get("pytest_nsa.launch.rank")
    return module.context() if module is not None else None


def require_rank(request: pytest.FixtureRequest, fixture: str) -> RankContext:
    """The context of this rank; fails the test with the reason when it does not run on ranks."""
    context = current_rank()
    if context is None:
        pytest.fail(
            f"the fixture '{fixture}' is for tests on ranks, and {request.node.name} runs on none: add @pytest.mark.world_size(2)",
            pytrace=False,
        )
    return context
