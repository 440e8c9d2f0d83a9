"""What a rank knows of itself, and whether this process is one. Imports nothing that only ranks need."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_nsa.wire.messages import Job

if TYPE_CHECKING:
    from nsa.trace.session import TraceSession


@dataclass(kw_only=True)
class RankContext:
    """What a rank's fixtures need. ``device`` is 'cpu' or 'cuda:0'."""

    rank: int
    job: Job
    device: str
    session: TraceSession
    notes: list[str]
    config: pytest.Config | None = None

    @property
    def folder(self) -> Path:
        """The folder of this rank's evidence."""
        return self.job.rank_folder(self.rank)


_current: RankContext | None = None


def become(context: RankContext) -> None:
    """Make this process a rank."""
    global _current
    _current = context


def current_rank() -> RankContext | None:
    """Return this process's context when it is a rank, else None."""
    return _current


def require_rank(request: pytest.FixtureRequest, fixture: str) -> RankContext:
    """Return the context of this rank; fail the test, with the reason, if it does not run on ranks."""
    if _current is None:
        pytest.fail(
            f"the fixture '{fixture}' is for tests on ranks, and {request.node.name} runs on none: add @pytest.mark.world_size(2)",
            pytrace=False,
        )
    return _current
