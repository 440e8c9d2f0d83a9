"""The fixtures. On ranks: `group`, `ddp`, `fsdp`, `trace`, `rank_tmp_path`; everywhere: `branch`, `gc_range`.

This module is loaded by every pytest run, ranks or not: a fixture imports what it needs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_nsa import marked
from pytest_nsa.marks import LayerRange
from pytest_nsa.rank.context import current_rank, require_rank

if TYPE_CHECKING:
    from pytest_nsa.rank.handles import DDP, FSDP, Group, Trace


def __getattr__(name: str) -> Any:
    """Import the type of a fixture's value when it is first used, as in ``from pytest_nsa.fixtures import DDP``."""
    if name not in ("DDP", "FSDP", "Group", "Trace", "make_group", "make_ddp", "make_fsdp", "make_trace"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pytest_nsa.rank import handles

    return getattr(handles, name)


@pytest.fixture(name="pytest_nsa_plugin")
def is_active() -> None:
    """Nothing: the decorator world_size requests it, so that its test fails where the plugin is not active."""


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Group:
    """The bare process group: rank, world_size, device, barrier(). The test runs on ranks."""
    return __getattr__("make_group")(require_rank(request, "group"))


@pytest.fixture
def ddp(request: pytest.FixtureRequest) -> DDP:
    """Wrap a model in DDP: `model = ddp.wrap(model)`. The test runs on ranks."""
    return __getattr__("make_ddp")(require_rank(request, "ddp"))


@pytest.fixture
def fsdp(request: pytest.FixtureRequest) -> FSDP:
    """Shard a model with FSDP: `model = fsdp.wrap(model)`. The test runs on ranks."""
    return __getattr__("make_fsdp")(require_rank(request, "fsdp"))


@pytest.fixture
def trace(request: pytest.FixtureRequest) -> Trace:
    """Trace a training step: `with trace(model): step()`, then `trace.missing_gradients()`. For tests on ranks."""
    return __getattr__("make_trace")(require_rank(request, "trace"))


@pytest.fixture
def rank_tmp_path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A temporary folder for this rank alone, inside `tmp_path`, which all ranks share. The test runs on ranks."""
    folder = tmp_path / f"rank{require_rank(request, 'rank_tmp_path').rank}"
    folder.mkdir(exist_ok=True)
    return folder


def _value(request: pytest.FixtureRequest, name: str) -> str | None:
    """Return the value that a bisection tries in this rank, else the parameter, else the mark's; None without any."""
    ctx = current_rank()
    tried = ctx.job.overrides.get(name) if ctx is not None else None
    return tried or getattr(request, "param", None) or marked.value(request.node, name)


@pytest.fixture
def branch(request: pytest.FixtureRequest) -> str | None:
    """The NSA branch of the mark branch('sel'); None without the mark."""
    return _value(request, "branch")


@pytest.fixture
def gc_range(request: pytest.FixtureRequest) -> LayerRange | None:
    """The layers of the mark gc_range('0:6'), as text with .start and .end; None without the mark.

    In the first run of ``--ranks-bisect gc_range`` it is empty: .start equals .end.
    """
    text = _value(request, "gc_range")
    return None if text is None else LayerRange(text, may_be_empty=True)
