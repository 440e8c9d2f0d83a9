"""What a rank knows of itself, and whether this process is one. Imports nothing that only ranks need."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from os import _exit as exit_at_once
from os import getpid  # bound before a test can replace it
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_nsa.wire.messages import Job

if TYPE_CHECKING:
    from nsa.trace.session import TraceSession

# What DDP, FSDP and optimizers import on first use. It costs a second, and every fork copies the page tables of 80 MB.
LATE = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.device_mesh")


@dataclass(kw_only=True)
class RankContext:
    """What a rank's fixtures need. ``device`` is 'cpu' or 'cuda:0'."""

    rank: int
    job: Job
    device: str
    session: TraceSession
    notes: list[str]
    config: pytest.Config | None = None
    pid: int = field(default_factory=getpid)

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


def end_if_forked(context: RankContext, *, passed: bool) -> None:
    """End this process if the rank's test has forked it: the rank alone goes on after the test's body, and has an outcome."""
    if getpid() == context.pid:
        return
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    exit_at_once(0 if passed else 1)


def require_rank(request: pytest.FixtureRequest, fixture: str) -> RankContext:
    """Return the context of this rank; fail the test, with the reason, if it does not run on ranks."""
    if _current is None:
        pytest.fail(
            f"the fixture '{fixture}' is for tests on ranks, and {request.node.name} runs on none: add @pytest.mark.world_size(2)",
            pytrace=False,
        )
    return _current
